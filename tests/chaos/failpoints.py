"""Failpoints: named places in the daemons where a process ends itself with SIGKILL, around one call of one function.

`python -m tests.chaos.failpoints multigpu_master.main …` runs the daemon's main with the failpoint that the environment
names wrapped around its function; in an engine, the handlers module wraps it. A failpoint whose side is FAILS raises
instead: the daemon must end itself. A failpoint triggers once: it writes a record to the history, and a process that
finds the record stays unarmed.
"""

import functools
import importlib
import inspect
import itertools
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigpu._build import build_of

from tests.chaos.records.history import History

MASTER, AGENT, ENGINE = "master", "agent", "engine"
BEFORE, AFTER, FAILS = "before", "after", "fails"
# What a daemon's log says of a function that a failpoint made fail.
ON_PURPOSE = "a fault on purpose"
# What to arm: "<name>|<call, from 1>|<the file of its record>".
VARIABLE = "CHAOS_FAILPOINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failpoint:
    name: str
    process: str
    module: str
    function: str  # as the module knows it, with its class
    side: str
    once: bool  # in the life of a process

    def owner(self) -> tuple[Any, str]:
        """The object that has the function, and its name there. AttributeError: it does not exist any more."""
        owner: Any = importlib.import_module(self.module)
        *classes, name = self.function.split(".")
        for part in classes:
            owner = getattr(owner, part)
        assert callable(getattr(owner, name)), f"{self.module}.{self.function} is not callable"
        return owner, name


def _around(process: str, name: str, module: str, function: str, *sides: str, once: bool = False) -> list[Failpoint]:
    return [
        Failpoint(name=f"{name}, {side}", process=process, module=module, function=function, side=side, once=once)
        for side in sides or (BEFORE, AFTER)
    ]


_M, _W = "multigpu_master", "multigpu_worker"
FAILPOINTS = [
    # Fsync: of what is large, and of a transaction, which SQLite writes and syncs within this call.
    *_around(MASTER, "fsync of a segment", "os", "fdatasync"),
    *_around(MASTER, "commit", f"{_M}.journal.sqlite.journal", "SqliteJournal._commit"),
    *_around(MASTER, "the loop learns of a commit", f"{_M}.write_buffer", "WriteBuffer.handle_commit"),
    # Ack.
    *_around(MASTER, "the answer to Submit", f"{_M}.rpc.task_service", "TaskService.Submit", AFTER),
    *_around(MASTER, "acceptances on Run", f"{_M}.rpc.run_stream", "RunStream._send_acceptances"),
    # Dispatch: the lease into a frame, the frame out of the outbox.
    *_around(MASTER, "a lease is put into a frame", f"{_M}.worker_streams", "WorkerStreams.dispatch"),
    *_around(MASTER, "a frame is taken to be written", f"{_M}.outbox", "Outbox.next", AFTER),
    # Report.
    *_around(MASTER, "the core takes reports", f"{_M}.core.workers.sessions", "Sessions.reports"),
    # Settle: the outcome into the client's frame, then to the journal.
    *_around(MASTER, "an outcome is delivered", f"{_M}.driver", "Driver._settled"),
    *_around(MASTER, "a cancellation is delivered", f"{_M}.driver", "Driver._send_held"),
    # An event of which only half is carried out.
    *_around(MASTER, "an outcome is sent", f"{_M}.driver", "Driver._send_outcomes", FAILS),
    *_around(MASTER, "leases are put into frames", f"{_M}.worker_streams", "WorkerStreams._put_leases", FAILS),
    *_around(MASTER, "leases end in the core", f"{_M}.core.ledger", "Ledger.succeed", FAILS),
    *_around(MASTER, "settles go to the journal", f"{_M}.write_buffer", "WriteBuffer.append_settles", AFTER),
    # The recovery from all of the above.
    *_around(MASTER, "the journal is opened", f"{_M}.journal.sqlite.journal", "SqliteJournal.open", once=True),
    *_around(MASTER, "the listeners are opened", f"{_M}.server", "Master._listen", once=True),
    *_around(AGENT, "hello", f"{_W}.master_stream", "MasterStream.hello", AFTER, once=True),
    *_around(AGENT, "leases come", f"{_W}.master_stream", "MasterStream.received"),
    *_around(AGENT, "a batch goes to the engine", f"{_W}.processes.process", "EngineProcess.dispatch"),
    *_around(AGENT, "the agent reads its engine", f"{_W}.processes.process", "EngineProcess.parse_frame"),
    *_around(AGENT, "reports leave", f"{_W}.session.session", "Session.take_frame"),
    *_around(ENGINE, "a batch is taken in", f"{_W}.engine.runtime", "Runtime._prepared", AFTER),
    *_around(ENGINE, "a task begins", f"{_W}.engine.reporter", "BatchReporter.begin", AFTER),
    *_around(ENGINE, "a partial output", f"{_W}.engine.reporter", "BatchReporter.partial"),
    *_around(ENGINE, "a result", f"{_W}.engine.reporter", "BatchReporter.succeed"),
    *_around(ENGINE, "the engine writes to the agent", f"{_W}.engine.channel", "AgentChannel.send"),
]
BY_NAME = {point.name: point for point in FAILPOINTS}


def usable() -> list[Failpoint]:
    """The failpoints of this installation: calls within compiled modules do not reach a function that wraps another."""
    return [point for point in FAILPOINTS if build_of(point.module) != "compiled"]


def variable(point: Failpoint, call: int, record: Path) -> dict[str, str]:
    """The environment that arms a failpoint: the process ends at its `call`-th call, and leaves its record there."""
    return {VARIABLE: f"{point.name}|{call}|{record}"}


def arm(*processes: str) -> None:
    """Wraps the function that the environment names, if it is of these processes and has not triggered yet."""
    if not (value := os.environ.get(VARIABLE, "")):
        return
    name, call, record = value.split("|")
    point = BY_NAME[name]
    if point.process in processes and not reached(Path(record)):
        owner, attribute = point.owner()
        setattr(owner, attribute, _wrapped(getattr(owner, attribute), point, int(call), Path(record)))


def _wrapped(function: Callable[..., Any], point: Failpoint, call: int, record: Path) -> Callable[..., Any]:
    """The function with a failpoint before or after its `call`-th call."""
    lock, calls = threading.Lock(), itertools.count(1)

    def passed(side: str) -> None:
        if (side == AFTER) != (point.side == AFTER):
            return
        with lock:
            if next(calls) == call:
                History(record).add("failpoint", name=point.name, process=point.process, pid=os.getpid())
                if point.side == FAILS:
                    raise OSError(ON_PURPOSE)
                os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        passed(BEFORE)
        answer = function(*arguments, **named)
        passed(AFTER)
        return answer

    @functools.wraps(function)
    async def wrapped_async(*arguments: Any, **named: Any) -> Any:
        passed(BEFORE)
        answer = await function(*arguments, **named)
        passed(AFTER)
        return answer

    return wrapped_async if inspect.iscoroutinefunction(function) else wrapped


def reached(record: Path) -> bool:
    """Whether the process has written its record: it may be killed between the creation of the file and the write."""
    return record.exists() and record.stat().st_size > 0


def main() -> None:
    """Runs the module that the first argument names as its own command line would, armed."""
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    arm(MASTER, AGENT)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
