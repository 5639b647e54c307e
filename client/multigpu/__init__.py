"""multigpu: a durable, GPU-aware task fabric. This is its public face in Python: the clients and what they speak of.

    import multigpu

    with multigpu.Client() as client:
        vectors = client.embed(["any text", "and another"])   # float32 [2, dimension]

Names are imported when they are first used, so that a daemon that needs `multigpu.v1` alone loads nothing else.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# gRPC reads it as it is imported. Its own handlers of a fork crash the child now and then; see
# multigpu._transport.forks.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if TYPE_CHECKING:
    from multigpu.aio import AsyncClient as AsyncClient
    from multigpu.client import Client as Client
    from multigpu.config.config import ConfigError as ConfigError
    from multigpu.errors import AccessError as AccessError
    from multigpu.errors import AlreadyExistsError as AlreadyExistsError
    from multigpu.errors import CallTimeoutError as CallTimeoutError
    from multigpu.errors import ClientClosedError as ClientClosedError
    from multigpu.errors import CursorExpiredError as CursorExpiredError
    from multigpu.errors import InvalidTaskError as InvalidTaskError
    from multigpu.errors import MultigpuError as MultigpuError
    from multigpu.errors import NotFoundError as NotFoundError
    from multigpu.errors import RejectedError as RejectedError
    from multigpu.errors import ResourceExhaustedError as ResourceExhaustedError
    from multigpu.errors import ResultExpiredError as ResultExpiredError
    from multigpu.errors import ResultLostError as ResultLostError
    from multigpu.errors import TaskCancelled as TaskCancelled
    from multigpu.errors import TaskDeadLettered as TaskDeadLettered
    from multigpu.errors import TaskError as TaskError
    from multigpu.errors import TaskExpired as TaskExpired
    from multigpu.errors import TaskFailed as TaskFailed
    from multigpu.errors import TransportError as TransportError
    from multigpu.errors import UnavailableError as UnavailableError
    from multigpu.errors import UnplaceableError as UnplaceableError
    from multigpu.handlers import Context as Context
    from multigpu.handlers import PermanentError as PermanentError
    from multigpu.handlers import handler as handler
    from multigpu.options import Input as Input
    from multigpu.outcome import Energy as Energy
    from multigpu.outcome import EnergyMethod as EnergyMethod
    from multigpu.outcome import Outcome as Outcome
    from multigpu.outcome import OutcomeState as OutcomeState
    from multigpu.outcome import Task as Task
    from multigpu.outcome import TaskState as TaskState

_HOMES = {
    "multigpu.aio": ("AsyncClient",),
    "multigpu.client": ("Client",),
    "multigpu.config.config": ("ConfigError",),
    "multigpu.errors": (
        "AccessError",
        "AlreadyExistsError",
        "CallTimeoutError",
        "ClientClosedError",
        "CursorExpiredError",
        "InvalidTaskError",
        "MultigpuError",
        "NotFoundError",
        "RejectedError",
        "ResourceExhaustedError",
        "ResultExpiredError",
        "ResultLostError",
        "TaskCancelled",
        "TaskDeadLettered",
        "TaskError",
        "TaskExpired",
        "TaskFailed",
        "TransportError",
        "UnavailableError",
        "UnplaceableError",
    ),
    "multigpu.handlers": ("Context", "PermanentError", "handler"),
    "multigpu.options": ("Input",),
    "multigpu.outcome": ("Energy", "EnergyMethod", "Outcome", "OutcomeState", "Task", "TaskState"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  a list of str, which sorted() returns


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'multigpu' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
