"""`mgpuctl models`: the models of the fleet, where they are loaded, and loading and unloading them."""

import functools
import time
from collections import Counter
from typing import Any

import click

from multigpu import AdminClient, NotFoundError
from multigpu._units import format_duration, format_size
from multigpu.cli import messages, show, tables
from multigpu.cli.admin import connected, find_worker_id
from multigpu.cli.commands import Group, list_by_default
from multigpu.cli.failures import Failure, NotFound
from multigpu.cli.models.plan import plan
from multigpu.cli.options import F, Number, json_option
from multigpu.cli.presence import suggestion
from multigpu.cli.progress import Progress
from multigpu.cli.tables import Column
from multigpu.cli.text import clean, since
from multigpu.fleet import Model, ModelEntry, ModelPlace, ModelState

POLL_S = 0.1


PLACES = (
    Column("WORKER", lambda place: place.worker_id),
    Column("STATE", lambda place: place.residency.state.name.lower()),
    Column("MEMORY", lambda place: format_size(place.residency.memory_bytes), right=True, rank=2),
    Column("LOADS", lambda place: f"{place.residency.loads:,}", right=True, rank=3),
    Column("LAST USED", lambda place: since(place.residency.last_use_time) or "-", right=True, rank=4),
    Column("PINNED", lambda place: "yes" if place.residency.pinned else "no", rank=1),
)


@click.group(cls=Group, invoke_without_command=True)
@json_option
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """See, plan, load and unload models: what is loaded where. Without a command, lists them.

    The first task for a model loads it. A model that is loaded with `load` is pinned: it stays until `unload`.
    """
    list_by_default(context, list_, as_json=as_json)


@models.command("list", examples=(("mgpuctl models list", "All models, and where they are loaded."),))
@connected
@json_option
def list_(admin: AdminClient, as_json: bool) -> None:
    """All models that workers offer, by name."""
    entries = admin.list_models()
    empty = "no worker offers a model; give workers a --model-repository"
    tables.show_rows(entries, _columns(entries), as_json=as_json, empty=empty)


@models.command(
    "show",
    examples=(
        ("mgpuctl models show bert", "Its files, versions, measurements, and where it is loaded."),
        ("mgpuctl models show bert:2 --json", "One version, for scripts."),
    ),
)
@click.argument("model")
@connected
@json_option
def show_(model: str, admin: AdminClient, as_json: bool) -> None:
    """Show one model. Digest, versions, precision and the result of its accuracy gate, where it is loaded."""
    entries = _require_entries(admin, model)
    if as_json:
        show.value([messages.as_dict(entry) for entry in entries])
        return
    for nth, entry in enumerate(entries):
        if nth:
            show.line()
        show.facts(_detail_rows(entry))
        tables.show_rows(entry.places, PLACES, empty="it is loaded nowhere")


models.add_command(plan)


def _place_options(command: F, *, wait_help: str) -> F:
    """The options of `load` and `unload`."""
    for option in (
        json_option,
        connected,
        click.option("--timeout", "timeout_s", type=Number(min=0), default=600.0, show_default=True,
                     metavar="SECONDS", help="How long to wait."),
        click.option("--wait", is_flag=True, help=wait_help),
        click.option("--worker", "worker_ids", multiple=True, metavar="ID", help="On this worker. May be repeated."),
        click.argument("model"),
    ):  # fmt: skip
        command = option(command)
    return command


@models.command(
    "load",
    examples=(
        ("mgpuctl models load bert --wait", "On the worker with most free memory; returns when it is ready."),
        ("mgpuctl models load bert:2 --worker host-GPU-1 --worker host-GPU-2", "One version, on these."),
    ),
)
@functools.partial(_place_options, wait_help="Return when it is ready.")
def load(model: str, wait: bool, admin: AdminClient, as_json: bool, **where: Any) -> None:
    """Load a model, and keep it loaded until it is unloaded. Survives restarts."""
    worker_ids = _set_loaded(admin, model, wait=wait, quiet=as_json, loaded=True, **where)
    if as_json:
        entries = [messages.as_dict(entry) for entry in _require_entries(admin, model)]
        show.value({"worker_ids": worker_ids, "models": entries})
    else:
        state = "is loaded" if wait else "is being loaded"
        show.line(clean(f"{model} {state} on {', '.join(worker_ids)}, and stays there"))


@models.command(
    "unload",
    examples=(
        ("mgpuctl models unload bert", "On every worker, all its versions."),
        ("mgpuctl models unload bert:1 --wait", "One version; returns when its memory is free."),
    ),
)
@functools.partial(_place_options, wait_help="Return when it is unloaded.")
def unload(model: str, wait: bool, admin: AdminClient, as_json: bool, **where: Any) -> None:
    """Unload a model, after its tasks on the worker. The next task for it loads it again."""
    worker_ids = _set_loaded(admin, model, wait=wait, quiet=as_json, loaded=False, **where)
    if as_json:
        show.value({"worker_ids": worker_ids})
    elif not worker_ids:
        show.line(f"{model} is loaded nowhere")
    else:
        show.line(clean(f"{model} {'is unloaded' if wait else 'is being unloaded'} from {', '.join(worker_ids)}"))


def _set_loaded(
    admin: AdminClient,
    model: str,
    *,
    worker_ids: tuple[str, ...],
    wait: bool,
    timeout_s: float,
    quiet: bool,
    loaded: bool,
) -> list[str]:
    """Loads or unloads a model. Returns the ids of the workers."""
    where = [find_worker_id(admin, prefix) for prefix in worker_ids]
    try:
        chosen = (admin.load_model if loaded else admin.unload_model)(model, where)
    except NotFoundError:
        _require_entries(admin, model)  # its error lists the known models
        raise
    if wait:
        with Progress("workers", len(chosen), quiet=quiet) as progress:
            _wait_until(admin, model, chosen, timeout_s, progress, loaded=loaded)
    return chosen


def _wait_until(
    admin: AdminClient, model: str, worker_ids: list[str], timeout_s: float, progress: Progress, *, loaded: bool
) -> None:
    """Returns when the model is ready on all of these workers, or gone from them. Raises Failure."""
    give_up_at = time.monotonic() + timeout_s
    left = list(worker_ids)
    while True:
        # `load NAME` means its current version, `unload NAME` all of its versions.
        entries = [e for e in _find_entries(admin, model) if not loaded or e.model.current or id_of(e.model) == model]
        for worker_id in list(left):
            places = [p for e in entries for p in e.places if p.worker_id == worker_id]
            ready = any(p.residency.state is ModelState.READY for p in places)
            if ready if loaded else not places:
                left.remove(worker_id)
                progress.add(1)
            error = next((e.model.error for e in entries if worker_id in e.worker_ids and e.model.error), "")
            if loaded and error and not places:
                raise Failure(
                    f"{model} can't be loaded on {worker_id}: {error}; the worker retries until "
                    f"`mgpuctl models unload {model}`"
                )
        if not left:
            return
        if time.monotonic() > give_up_at:
            raise Failure(
                f"{model} is not {'ready' if loaded else 'gone'} after {timeout_s:g} s on {', '.join(left)}; it is "
                "still under way: see `mgpuctl models show`"
            )
        time.sleep(POLL_S)


def _find_entries(admin: AdminClient, model: str) -> list[ModelEntry]:
    """The entries of a model: all its versions, or the one named."""
    return [e for e in admin.list_models() if model in (e.model.name, id_of(e.model))]


def _require_entries(admin: AdminClient, model: str) -> list[ModelEntry]:
    """As `_find_entries`. Raises NotFound if there is none."""
    entries = _find_entries(admin, model)
    if not entries:
        names = {name for e in admin.list_models() for name in (e.model.name, id_of(e.model))}
        raise NotFound(f"no worker offers model {model!r}{suggestion(model, names)}")
    return entries


def id_of(model: Model) -> str:
    return f"{model.name}:{model.version}" if model.version else model.name


def _title(model: Model) -> str:
    return id_of(model) + (" (current)" if model.version and model.current else "")


def _load_time(model: Model) -> str:
    return "" if model.load_duration_s is None else format_duration(model.load_duration_s)


def _columns(entries: list[ModelEntry]) -> tuple[Column, ...]:
    ids = Counter(id_of(e.model) for e in entries)

    def workers(entry: ModelEntry) -> str:
        # A model has several entries if its workers report different facts: then list the workers.
        return str(len(entry.worker_ids)) if ids[id_of(entry.model)] == 1 else ", ".join(entry.worker_ids)

    return (
        Column("MODEL", lambda e: _title(e.model)),
        Column("KIND", lambda e: e.model.kind, rank=3),
        Column("ENGINE", lambda e: e.model.engine, rank=1),
        Column("PRECISION", lambda e: e.model.precision, rank=4),
        Column("MEMORY", lambda e: format_size(n) if (n := e.model.memory_bytes) else "-", right=True, rank=2),
        Column("LOADS IN", lambda e: _load_time(e.model) or "-", right=True, rank=6),
        Column("WORKERS", workers, right=True, rank=5),
        Column("LOADED ON", lambda e: ", ".join(map(_place_text, e.places)) or "-"),
        Column("", lambda e: e.model.error),
    )


def _place_text(place: ModelPlace) -> str:
    """The worker; in brackets its state, unless it is ready, and "pinned"."""
    state = place.residency.state.name.lower()
    notes = [*([state] if state != "ready" else []), *(["pinned"] if place.residency.pinned else [])]
    return place.worker_id + (f" ({', '.join(notes)})" if notes else "")


def _detail_rows(entry: ModelEntry) -> list[tuple[str, str]]:
    model = entry.model
    return [
        ("model", _title(model)),
        ("kind", model.kind),
        ("source", model.source),
        ("engine", model.engine),
        ("precision", model.precision),
        ("digest", model.digest or "not computed yet"),
        ("files", format_size(model.files_bytes)),
        ("memory", format_size(model.memory_bytes) if model.memory_bytes else "never loaded"),
        ("loads in", _load_time(model)),
        *((f"label {key}", value) for key, value in sorted(model.labels.items())),
        *sorted((name, fact) for name, fact in model.facts.items() if name not in ("engine", "precision")),
        ("offered by", ", ".join(entry.worker_ids)),
        ("error", model.error),
    ]
