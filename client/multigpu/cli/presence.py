"""Waiting for a fleet: until a master answers and a connected worker serves what is wanted."""

import difflib
import time
from collections.abc import Callable, Iterable

from multigpu.cli.failures import Failure, Unreachable
from multigpu.cli.rpc import Master
from multigpu.v1 import admin_service_pb2 as admin

POLL_INTERVAL_S = 0.1
TIMEOUT_S = 60.0
# A longer list is read by nobody.
MODELS_NAMED_MAX = 20


class NoSuchModelFailure(Failure):
    """Connected workers serve the kind, and none of them with that model."""


def wait_for_worker(
    address: str, kind: str, model: str, *, timeout_s: float | None, say: Callable[[str], None]
) -> None:
    """Returns once a connected worker serves the kind (and the model, unless it is empty). Says what it waits for.

    Raises Unreachable or Failure when `timeout_s` are over. None: TIMEOUT_S, but nothing where workers are there, and
    have other models: its name is more likely wrong than late.
    """
    give_up = time.monotonic() + (TIMEOUT_S if timeout_s is None else timeout_s)
    said = ""
    with Master(address) as master:
        while (missing := what_is_missing(master, kind, model)) is not None:
            left_s = give_up - time.monotonic()
            if left_s <= 0 or (timeout_s is None and isinstance(missing, NoSuchModelFailure)):
                raise missing
            if str(missing) != said:
                said = str(missing)
                say(f"waiting up to {left_s:.0f} s: {said}")
            time.sleep(min(POLL_INTERVAL_S, left_s))


def what_is_missing(master: Master, kind: str, model: str) -> Failure | None:
    """What keeps a task of this kind from running; None if a worker could take it."""
    try:
        workers = master.list_workers()
    except Unreachable as failure:
        return failure
    connected = [worker for worker in workers if worker.state == admin.WORKER_STATE_ACTIVE]
    offered = [capability for worker in connected for capability in worker.capabilities if capability.kind == kind]
    if any(not model or not capability.models or model in capability.models for capability in offered):
        return None
    if offered:
        hint = there_are(model, {name for capability in offered for name in capability.models})
        return NoSuchModelFailure(f"no connected worker serves {kind} with the model {model!r}{hint}")
    kinds = ", ".join(sorted({capability.kind for worker in connected for capability in worker.capabilities}))
    return Failure(
        f"no connected worker serves {kind!r}; " + (f"they serve: {kinds}" if kinds else "no worker is connected")
    )


def there_are(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about a model that there isn't: one whose name is near, and those that there are."""
    known = sorted(set(names))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ";"
    more = f" and {len(known) - MODELS_NAMED_MAX} more" if len(known) > MODELS_NAMED_MAX else ""
    return f"{hint} there are: {', '.join(known[:MODELS_NAMED_MAX]) or 'none'}{more}"
