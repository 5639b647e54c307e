"""Waiting for a fleet: until a master answers and a connected worker serves a kind and model."""

import difflib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from multigpu import AdminClient, CallTimeoutError, UnavailableError
from multigpu.cli import show
from multigpu.cli.admin import active, connection
from multigpu.cli.failures import Failure, Unreachable, WrongUsage
from multigpu.fleet import ModelState, Worker

POLL_INTERVAL_S = 0.1
TIMEOUT_S = 60.0
# A model that loads faster than this is not worth a note.
LOADING_SILENCE_S = 2.0
NAMES_MAX = 20


class NotServedFailure(Failure):
    """Workers are connected, but none of them serves the kind, or not with that model."""


def wait_for_worker(
    address: str, kind: str, model: str, *, timeout_s: float | None, say: Callable[[str], None]
) -> None:
    """Returns once a connected worker serves the kind (and the model, unless it is empty).

    Raises Unreachable or Failure after `timeout_s`. None: after TIMEOUT_S, or at once if the connected workers serve
    something else: a mistyped name is likelier than a late worker.
    """
    give_up_at = time.monotonic() + (TIMEOUT_S if timeout_s is None else timeout_s)
    said = ""
    with connection(address) as admin:
        while (missing := _missing(admin, kind, model)) is not None:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0 or (timeout_s is None and isinstance(missing, NotServedFailure)):
                raise missing
            if str(missing) != said:
                said = str(missing)
                say(f"waiting up to {left_s:.0f} s: {said}")
            time.sleep(min(POLL_INTERVAL_S, left_s))


def _missing(admin: AdminClient, kind: str, model: str) -> Failure | None:
    try:
        missing = not_served(active(admin.list_workers()), kind, model)
        if model and isinstance(missing, NotServedFailure):
            for entry in admin.list_models(model.partition(":")[0]):
                if entry.model.error:
                    return NotServedFailure(f"the model {model!r} can't be served: {entry.model.error}")
    except (UnavailableError, CallTimeoutError) as error:
        return Unreachable(str(error))
    return missing


def not_served(connected: Sequence[Worker], kind: str, model: str = "") -> Failure | None:
    """Why no connected worker takes a task of this kind; None if one does."""
    offered = [capability for worker in connected for capability in worker.capabilities if capability.kind == kind]
    if any(not model or not capability.models or model in capability.models for capability in offered):
        return None
    if offered:
        hint = suggestion(model, {name for capability in offered for name in capability.models})
        return NotServedFailure(f"no connected worker serves {kind} with the model {model!r}{hint}")
    kinds = ", ".join(sorted({capability.kind for worker in connected for capability in worker.capabilities}))
    if not kinds:
        return Failure(f"no worker that serves {kind} is connected; `mgpuctl workers` lists the known workers")
    return NotServedFailure(f"no connected worker serves {kind}; they serve: {kinds}")


@contextmanager
def loading_notes(address: str, kind: str, model: str, say: Callable[[str], None]) -> Iterator[threading.Event]:
    """Says which workers are loading the model (empty: any of the kind) until the event is set."""
    answered = threading.Event()

    def run() -> None:
        said: set[tuple[str, str]] = set()
        while not answered.wait(LOADING_SILENCE_S):
            # The command itself reports failures of its master.
            with suppress(Failure), connection(address) as admin:
                for model_and_worker in sorted(_loading(admin.list_workers(), kind, model) - said):
                    said.add(model_and_worker)
                    say("loading {} on {}…".format(*model_and_worker))

    threading.Thread(target=run, name="loading notes", daemon=True).start()
    try:
        yield answered
    finally:
        answered.set()


def _loading(workers: Iterable[Worker], kind: str, model: str) -> set[tuple[str, str]]:
    """Model and worker, for each worker that loads it and has tasks."""
    return {
        (each.model, worker.worker_id)
        for worker in workers
        for each in worker.models
        if each.state is ModelState.LOADING and worker.leases
        if model in ("", each.model, each.model.partition(":")[0])
        if any(offer.kind == kind and each.model in offer.models for offer in worker.capabilities)
    }


def check_takes_model(address: str, kind: str) -> None:
    """WrongUsage: connected workers serve the kind, and none of them has a model for it."""
    with connection(address) as admin:
        offered = [found for worker in admin.list_workers() for found in worker.capabilities if found.kind == kind]
    if offered and not any(found.models for found in offered):
        raise WrongUsage(f"the kind {kind!r} takes no model: omit --model")


def note_unknown_queue(admin: AdminClient, name: str) -> None:
    """Notes on stderr that no queue of this name has tasks or rules: it may be mistyped."""
    if name not in ("", "default") and name not in (names := [queue.queue for queue in admin.list_queues()]):
        show.note(f"no queue {name!r} has tasks or rules{suggestion(name, names)}")


def suggestion(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known name, and the list of them."""
    known = sorted(set(names))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ";"
    more = f" and {len(known) - NAMES_MAX} more" if len(known) > NAMES_MAX else ""
    return f"{hint} there are: {', '.join(known[:NAMES_MAX]) or 'none'}{more}"
