"""Waiting for a fleet: until a master answers and a connected worker serves what is wanted."""

import difflib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from multigpu.cli.failures import Failure, Unreachable, WrongUsage
from multigpu.cli.rpc import Master
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import model_pb2

POLL_INTERVAL_S = 0.1
TIMEOUT_S = 60.0
# How long a command stays silent about the loading of its model.
LOADING_SILENCE_S = 2.0
# A longer list is read by nobody.
MODELS_NAMED_MAX = 20


class NotServedFailure(Failure):
    """Workers are connected, and none of them serves the kind, or not with that model."""


def wait_for_worker(
    address: str, kind: str, model: str, *, timeout_s: float | None, say: Callable[[str], None]
) -> None:
    """Returns once a connected worker serves the kind (and the model, unless it is empty). Says what it waits for.

    Raises Unreachable or Failure when `timeout_s` are over. None: TIMEOUT_S, but nothing where workers are connected
    and serve something else: a wrong name is likelier than a late worker.
    """
    give_up = time.monotonic() + (TIMEOUT_S if timeout_s is None else timeout_s)
    said = ""
    with Master(address) as master:
        while (missing := what_is_missing(master, kind, model)) is not None:
            left_s = give_up - time.monotonic()
            if left_s <= 0 or (timeout_s is None and isinstance(missing, NotServedFailure)):
                raise missing
            if str(missing) != said:
                said = str(missing)
                say(f"waiting up to {left_s:.0f} s: {said}")
            time.sleep(min(POLL_INTERVAL_S, left_s))


def what_is_missing(master: Master, kind: str, model: str) -> Failure | None:
    """What keeps a task of this kind from running; None if a worker could take it."""
    try:
        connected = master.connected_workers()
    except Unreachable as failure:
        return failure
    offered = [capability for worker in connected for capability in worker.capabilities if capability.kind == kind]
    if any(not model or not capability.models or model in capability.models for capability in offered):
        return None
    if offered:
        hint = there_are(model, {name for capability in offered for name in capability.models})
        return NotServedFailure(f"no connected worker serves {kind} with the model {model!r}{hint}")
    kinds = ", ".join(sorted({capability.kind for worker in connected for capability in worker.capabilities}))
    if not kinds:
        return Failure(
            f"no worker that serves {kind} is connected; `mgpuctl workers` lists those that the master knows"
        )
    return NotServedFailure(f"no connected worker serves {kind}; they serve: {kinds}")


@contextmanager
def loading_told(address: str, kind: str, model: str, say: Callable[[str], None]) -> Iterator[threading.Event]:
    """Says which workers are loading the model (empty: any of the kind), until the event is set: a result has come."""
    answered = threading.Event()

    def tell() -> None:
        said: set[tuple[str, str]] = set()
        # The command itself says what is wrong with its master.
        while not answered.wait(LOADING_SILENCE_S):
            with suppress(Failure), Master(address) as master:
                for loading in sorted(found_loading(master.list_workers(), kind, model) - said):
                    said.add(loading)
                    say("loading {} on {}…".format(*loading))

    threading.Thread(target=tell, name="loading notes", daemon=True).start()
    try:
        yield answered
    finally:
        answered.set()


def found_loading(workers: Iterable[admin.Worker], kind: str, model: str) -> set[tuple[str, str]]:
    """Model and worker, for each that loads it and has tasks."""
    return {
        (each.model, worker.worker_id)
        for worker in workers
        for each in worker.models
        if each.state == model_pb2.MODEL_STATE_LOADING and worker.leases
        if model in ("", each.model, each.model.partition(":")[0])
        if any(offer.kind == kind and each.model in offer.models for offer in worker.capabilities)
    }


def check_takes_model(address: str, kind: str) -> None:
    """WrongUsage: connected workers serve the kind, and none of them has a model for it."""
    with Master(address) as master:
        offered = [found for worker in master.list_workers() for found in worker.capabilities if found.kind == kind]
    if offered and not any(found.models for found in offered):
        raise WrongUsage(f"the kind {kind!r} takes no model: leave --model out")


def there_are(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about a model that there isn't: one whose name is near, and those that there are."""
    known = sorted(set(names))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ";"
    more = f" and {len(known) - MODELS_NAMED_MAX} more" if len(known) > MODELS_NAMED_MAX else ""
    return f"{hint} there are: {', '.join(known[:MODELS_NAMED_MAX]) or 'none'}{more}"
