"""`mgpuctl models`: what the fleet can serve, what is loaded where, and loading and unloading by hand."""

import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import click

from multigpu.cli import show, tables
from multigpu.cli.commands import Group
from multigpu.cli.failures import Failure, NotFound
from multigpu.cli.models.verify import verify
from multigpu.cli.options import Number, json_option, master_option
from multigpu.cli.presence import there_are
from multigpu.cli.progress import Progress
from multigpu.cli.rpc import Master
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import model_pb2

POLL_S = 0.1
# On a narrow terminal these columns go, the first of them first.
OPTIONAL = ("LOADS IN", "WORKERS", "PRECISION", "KIND", "MEMORY", "ENGINE")
OPTIONAL_PLACES = ("LAST USED", "LOADS", "MEMORY", "PINNED")

F = TypeVar("F", bound=Callable[..., Any])


@click.group(cls=Group, invoke_without_command=True)
@click.pass_context
def models(context: click.Context) -> None:
    """See, load, unload and verify models: what is loaded where. Without a command, lists them.

    Nobody has to load a model: the first task for it does. What is loaded by hand is pinned: it stays until it is
    unloaded by hand.
    """
    if context.invoked_subcommand is None:
        context.invoke(list_)


models.add_command(verify)


@models.command("list", examples=(("mgpuctl models list", "All models, and where they are loaded."),))
@master_option
@json_option
def list_(address: str, as_json: bool) -> None:
    """All models that workers offer, by name."""
    with Master(address) as master:
        entries = all_models(master)
    if as_json:
        show.value([show.as_dict(entry) for entry in entries])
    else:
        show_models(entries)


@models.command(
    "show",
    examples=(
        ("mgpuctl models show bert", "Its files, its versions, what was measured, where it is loaded."),
        ("mgpuctl models show bert:2 --json", "One version, for scripts."),
    ),
)
@click.argument("model")
@master_option
@json_option
def show_(model: str, address: str, as_json: bool) -> None:
    """Show one model. Digest, versions, precision and the figure of its accuracy gate, where it is loaded."""
    with Master(address) as master:
        entries = known(master, model)
    if as_json:
        show.value([show.as_dict(entry) for entry in entries])
        return
    for nth, entry in enumerate(entries):
        if nth:
            show.line()
        show_model(entry)


def placing(command: F, *, wait_help: str) -> F:
    """Gives a command what loading and unloading share."""
    for option in (
        json_option,
        master_option,
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
        ("mgpuctl models load bert --wait", "On the worker with most room; returns when it is ready."),
        ("mgpuctl models load bert:2 --worker host-GPU-1 --worker host-GPU-2", "One version, on these."),
    ),
)
@functools.partial(placing, wait_help="Return when it is ready.")
def load(model: str, wait: bool, address: str, as_json: bool, **where: Any) -> None:
    """Load a model, and keep it loaded until it is unloaded. Survives restarts."""
    with Master(address) as master:
        told = place(master, model, wait=wait, quiet=as_json, loaded=True, **where)
        entries = known(master, model)
    if as_json:
        show.value({"worker_ids": told, "models": [show.as_dict(entry) for entry in entries]})
    else:
        show.line(
            show.clean(f"{model} {'is loaded' if wait else 'is being loaded'} on {', '.join(told)}, and stays there")
        )


@models.command(
    "unload",
    examples=(
        ("mgpuctl models unload bert", "Wherever it is loaded, all its versions."),
        ("mgpuctl models unload bert:1 --wait", "One version; returns when its memory is free."),
    ),
)
@functools.partial(placing, wait_help="Return when it is unloaded.")
def unload(model: str, wait: bool, address: str, as_json: bool, **where: Any) -> None:
    """Unload a model, once the tasks that are with a worker are done. The next task for it loads it again."""
    with Master(address) as master:
        told = place(master, model, wait=wait, quiet=as_json, loaded=False, **where)
    if as_json:
        show.value({"worker_ids": told})
    elif not told:
        show.line(f"{model} is loaded nowhere")
    else:
        show.line(show.clean(f"{model} {'is gone from' if wait else 'goes from'} {', '.join(told)}"))


def place(
    master: Master, model: str, *, worker_ids: tuple[str, ...], wait: bool, timeout_s: float, quiet: bool, loaded: bool
) -> list[str]:
    """Load a model, or unload it. Returns the ids of the workers that were told to."""
    where = [master.find_worker_id(prefix) for prefix in worker_ids]
    method = master.admin.LoadModel if loaded else master.admin.UnloadModel
    request = admin.LoadModelRequest if loaded else admin.UnloadModelRequest
    try:
        told = list(master.call(method, request(model=model, worker_ids=where)).worker_ids)
    except NotFound:
        known(master, model)  # says which there are
        raise
    if wait:
        _await(master, model, told, timeout_s, quiet=quiet, loaded=loaded)
    return told


def _await(master: Master, model: str, worker_ids: list[str], timeout_s: float, *, quiet: bool, loaded: bool) -> None:
    """Returns when the model is ready on all of these workers, or gone from them. Failure: it never will be."""
    until = time.monotonic() + timeout_s
    left = dict.fromkeys(worker_ids)
    with Progress("workers", len(left), quiet=quiet) as progress:
        while True:
            # Loading a name is loading its current version; unloading it, all of them.
            entries = [e for e in found(master, model) if not loaded or e.model.current or id_of(e.model) == model]
            for worker_id in list(left):
                places = [p for e in entries for p in e.places if p.worker_id == worker_id]
                ready = any(p.residency.state == model_pb2.MODEL_STATE_READY for p in places)
                if ready if loaded else not places:
                    del left[worker_id]
                    progress.add(1)
                error = next((e.model.error for e in entries if worker_id in e.worker_ids and e.model.error), "")
                if loaded and error and not places:
                    raise Failure(
                        f"{model} can't be loaded on {worker_id}: {error}; it is tried again until "
                        f"`mgpuctl models unload {model}` ends that"
                    )
            if not left:
                return
            if time.monotonic() > until:
                raise Failure(
                    f"{model} is not {'ready' if loaded else 'gone'} after {timeout_s:g} s on {', '.join(left)}; it is "
                    "still under way: `mgpuctl models show` tells how it goes"
                )
            time.sleep(POLL_S)


def all_models(master: Master, name: str = "") -> list[admin.ModelEntry]:
    request = admin.ListModelsRequest(name=name, page_size=1000)
    return [entry for page in master.pages(master.admin.ListModels, request) for entry in page.models]


def found(master: Master, model: str) -> list[admin.ModelEntry]:
    """The entries of a model: all its versions, or the one named."""
    return [e for e in all_models(master) if model in (e.model.name, id_of(e.model))]


def known(master: Master, model: str) -> list[admin.ModelEntry]:
    """As `found`. NotFound: there is none."""
    entries = found(master, model)
    if not entries:
        names = {name for e in all_models(master) for name in (e.model.name, id_of(e.model))}
        raise NotFound(f"no worker offers model {model!r}{there_are(model, names)}")
    return entries


def id_of(model: model_pb2.Model) -> str:
    return f"{model.name}:{model.version}" if model.version else model.name


def show_models(entries: list[admin.ModelEntry]) -> None:
    columns = ("MODEL", "KIND", "ENGINE", "PRECISION", "MEMORY", "LOADS IN", "WORKERS", "LOADED ON", "")
    ids = Counter(id_of(e.model) for e in entries)
    rows = [
        (
            id_of(e.model) + (" (current)" if e.model.version and e.model.current else ""),
            e.model.kind,
            e.model.engine,
            e.model.precision,
            show.size(e.model.memory_bytes) if e.model.memory_bytes else "-",
            show.duration(show.seconds_of(e.model.load_duration)) if e.model.HasField("load_duration") else "-",
            # What workers tell of a model may differ, and then it matters which say what.
            str(len(e.worker_ids)) if ids[id_of(e.model)] == 1 else ", ".join(e.worker_ids),
            ", ".join(place_in_words(place) for place in e.places) or "-",
            e.model.error,
        )
        for e in entries
    ]
    empty = "no worker offers a model; give workers a --model-repository"
    tables.table(columns, rows, right=("MEMORY", "LOADS IN", "WORKERS"), optional=OPTIONAL, empty=empty)


def place_in_words(place: admin.ModelPlace) -> str:
    """Where a model is loaded, and in brackets what is special about it."""
    state = show.enum_name(place.residency, "state").lower()
    special = [*([state] if state != "ready" else []), *(["pinned"] if place.residency.pinned else [])]
    return place.worker_id + (f" ({', '.join(special)})" if special else "")


def show_model(entry: admin.ModelEntry) -> None:
    model = entry.model
    pairs = [
        ("model", id_of(model) + (" (current)" if model.version and model.current else "")),
        ("kind", model.kind),
        ("source", model.source),
        ("engine", model.engine),
        ("precision", model.precision),
        ("digest", model.digest or "not computed yet"),
        ("files", show.size(model.files_bytes)),
        ("memory", show.size(model.memory_bytes) if model.memory_bytes else "never loaded"),
    ]
    if model.HasField("load_duration"):
        pairs.append(("loads in", show.duration(show.seconds_of(model.load_duration))))
    pairs += [(f"label {key}", value) for key, value in sorted(model.labels.items())]
    pairs += sorted((name, fact) for name, fact in model.facts.items() if name not in ("engine", "precision"))
    pairs.append(("offered by", ", ".join(entry.worker_ids)))
    if model.error:
        pairs.append(("error", model.error))
    show.facts(pairs)
    rows = [
        (
            place.worker_id,
            show.enum_name(place.residency, "state").lower(),
            show.size(place.residency.memory_bytes),
            f"{place.residency.loads:,}",
            show.age(place.residency, "last_use_time") if place.residency.HasField("last_use_time") else "-",
            "yes" if place.residency.pinned else "no",
        )
        for place in entry.places
    ]
    columns = ("WORKER", "STATE", "MEMORY", "LOADS", "LAST USED", "PINNED")
    right = ("MEMORY", "LOADS", "LAST USED")
    tables.table(columns, rows, right=right, optional=OPTIONAL_PLACES, empty="it is loaded nowhere")
