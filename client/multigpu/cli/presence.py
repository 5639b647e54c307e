"""Waiting for a fleet: until a master answers and a connected worker serves a kind and model."""

import difflib
import time
from collections.abc import Callable, Iterable, Sequence

from multigpu.cli.failures import Failure, Unreachable
from multigpu.cli.rpc import Master
from multigpu.v1 import admin_service_pb2 as admin

POLL_INTERVAL_S = 0.1
TIMEOUT_S = 60.0
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
    with Master(address) as master:
        while (missing := _missing(master, kind, model)) is not None:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0 or (timeout_s is None and isinstance(missing, NotServedFailure)):
                raise missing
            if str(missing) != said:
                said = str(missing)
                say(f"waiting up to {left_s:.0f} s: {said}")
            time.sleep(min(POLL_INTERVAL_S, left_s))


def _missing(master: Master, kind: str, model: str) -> Failure | None:
    try:
        return not_served(master.connected_workers(), kind, model)
    except Unreachable as failure:
        return failure


def not_served(connected: Sequence[admin.Worker], kind: str, model: str = "") -> Failure | None:
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


def suggestion(name: str, names: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known name, and the list of them."""
    known = sorted(set(names))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ";"
    more = f" and {len(known) - NAMES_MAX} more" if len(known) > NAMES_MAX else ""
    return f"{hint} there are: {', '.join(known[:NAMES_MAX]) or 'none'}{more}"
