"""multigpu: a durable, GPU-aware task fabric. The public names of its Python SDK.

    import multigpu

    with multigpu.Client() as client:
        vectors = client.embed(["any text", "and another"])   # float32 [2, dimension]

The clients are imported when they are first used: daemons that need `multigpu.v1` alone don't load them.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from multigpu._encoding import Arguments as Arguments
from multigpu._encoding import allow_pickle as allow_pickle
from multigpu.contexts import Context as Context
from multigpu.contexts import context as context
from multigpu.errors import AccessError as AccessError
from multigpu.errors import AlreadyExistsError as AlreadyExistsError
from multigpu.errors import CallTimeoutError as CallTimeoutError
from multigpu.errors import ClientClosedError as ClientClosedError
from multigpu.errors import ConfigError as ConfigError
from multigpu.errors import CursorExpiredError as CursorExpiredError
from multigpu.errors import InvalidRequestError as InvalidRequestError
from multigpu.errors import InvalidTaskError as InvalidTaskError
from multigpu.errors import MultigpuError as MultigpuError
from multigpu.errors import NotFoundError as NotFoundError
from multigpu.errors import PlanError as PlanError
from multigpu.errors import RejectedError as RejectedError
from multigpu.errors import ResourceExhaustedError as ResourceExhaustedError
from multigpu.errors import TransportError as TransportError
from multigpu.errors import UnavailableError as UnavailableError
from multigpu.errors import UnplaceableError as UnplaceableError
from multigpu.handlers import batch as batch
from multigpu.handlers import handler as handler
from multigpu.handles import as_completed as as_completed
from multigpu.handles import gather as gather
from multigpu.handles import wait as wait
from multigpu.outcome import Energy as Energy
from multigpu.outcome import EnergyMethod as EnergyMethod
from multigpu.outcome import Outcome as Outcome
from multigpu.outcome import OutcomeState as OutcomeState
from multigpu.outcome import RemoteError as RemoteError
from multigpu.outcome import ResultExpiredError as ResultExpiredError
from multigpu.outcome import ResultFormatError as ResultFormatError
from multigpu.outcome import ResultLostError as ResultLostError
from multigpu.outcome import TaskCancelled as TaskCancelled
from multigpu.outcome import TaskError as TaskError
from multigpu.outcome import TaskExpired as TaskExpired
from multigpu.outcome import TaskFailed as TaskFailed
from multigpu.task import Task as Task
from multigpu.task import TaskState as TaskState

__version__ = "0.1.0"

# gRPC reads it as it is imported. Its own handlers of a fork crash the child now and then; see
# multigpu._transport.forks.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if TYPE_CHECKING:
    from multigpu._async.admin import AsyncAdminClient as AsyncAdminClient
    from multigpu._async.client import AsyncClient as AsyncClient
    from multigpu._async.handles import AsyncTaskHandle as AsyncTaskHandle
    from multigpu._sync.admin import AdminClient as AdminClient
    from multigpu._sync.client import Client as Client
    from multigpu._sync.handles import TaskHandle as TaskHandle
    from multigpu.options import Input as Input
    from multigpu.planning import Plan as Plan
    from multigpu.planning import plan as plan

_LAZY = {
    "AdminClient": "multigpu._sync.admin",
    "AsyncAdminClient": "multigpu._async.admin",
    "AsyncClient": "multigpu._async.client",
    "AsyncTaskHandle": "multigpu._async.handles",
    "Client": "multigpu._sync.client",
    "Input": "multigpu.options",
    "Plan": "multigpu.planning",
    "TaskHandle": "multigpu._sync.handles",
    "plan": "multigpu.planning",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'multigpu' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])


_OWN = [name for name, value in globals().items() if getattr(value, "__module__", "").startswith("multigpu.")]
__all__ = sorted([*_OWN, *_LAZY])  # noqa: PLE0605  a list of str, which sorted() returns
