"""Failpoints: named places in the daemons where a process ends itself with SIGKILL, around one call of one function.

`python -m tests.chaos.failpoints multigpu_master.main …` runs the real daemon's main with the one failpoint that the
environment names wrapped around its function; in an engine, the handlers module does the wrapping. The product knows
nothing of it. One whose side is FAILS raises instead: it is for the daemon to end itself. A failpoint goes off once: it
leaves a record in the history, and whoever finds that stays unarmed, so that an engine started again lives.
"""

import functools
import importlib
import inspect
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.records.history import History

MASTER, AGENT, ENGINE = "master", "agent", "engine"
BEFORE, AFTER, FAILS = "before", "after", "fails"
# What a daemon's log says of a function that a failpoint made fail.
ON_PURPOSE = "a fault on purpose"
# What to arm: "<name>|<call, from 1>|<the file that says it went off>".
VARIABLE = "CHAOS_FAILPOINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failpoint:
    """See the module."""

    name: str
    room: str
    module: str
    function: str  # as the module knows it, with its class
    side: str
    once: bool  # in the life of a process

    def owner(self) -> tuple[Any, str]:
        """Where the function hangs, and by which name. AttributeError: it is there no longer."""
        owner: Any = importlib.import_module(self.module)
        *classes, name = self.function.split(".")
        for part in classes:
            owner = getattr(owner, part)
        assert callable(getattr(owner, name)), f"{self.module}.{self.function} can't be called"
        return owner, name


def _around(room: str, name: str, module: str, function: str, *sides: str, once: bool = False) -> list[Failpoint]:
    return [
        Failpoint(name=f"{name}, {side}", room=room, module=module, function=function, side=side, once=once)
        for side in sides or (BEFORE, AFTER)
    ]


_M, _W = "multigpu_master", "multigpu_worker"
FAILPOINTS = [
    # Fsync: of what is large, and of a transaction, which SQLite writes and syncs within this call.
    *_around(MASTER, "fsync of a segment", "os", "fdatasync"),
    *_around(MASTER, "commit", f"{_M}.journal.sqlite.journal", "SqliteJournal._commit"),
    *_around(MASTER, "the loop learns of a commit", f"{_M}.journal.write_buffer", "Journaling._committed"),
    # Ack.
    *_around(MASTER, "the answer to Submit", f"{_M}.rpc.task_service", "TaskService.Submit", AFTER),
    *_around(MASTER, "acceptances on Run", f"{_M}.rpc.run_stream", "RunStream._send_acceptances"),
    # Dispatch: the lease into a frame, the frame out of the outbox.
    *_around(MASTER, "a lease is put into a frame", f"{_M}.worker_streams", "WorkerStreams.dispatch"),
    *_around(MASTER, "a frame is taken to be written", f"{_M}.rpc.outbox", "Outbox.next", AFTER),
    # Report.
    *_around(MASTER, "the core takes reports", f"{_M}.core.workers.sessions", "Sessions.reports"),
    # Settle: the outcome into the client's frame, then to the journal.
    *_around(MASTER, "an outcome is delivered", f"{_M}.driver", "Driver._settled"),
    *_around(MASTER, "a cancellation is told", f"{_M}.driver", "Driver._tell_later"),
    # An event of which only half is carried out.
    *_around(MASTER, "an outcome is told", f"{_M}.driver", "Driver._tell", FAILS),
    *_around(MASTER, "leases are put into frames", f"{_M}.worker_streams", "WorkerStreams._put_leases", FAILS),
    *_around(MASTER, "leases end in the core", f"{_M}.core.ledger", "Ledger.succeed", FAILS),
    *_around(MASTER, "settles go to the journal", f"{_M}.journal.write_buffer", "Journaling.settles", AFTER),
    # The recovery from all of the above.
    *_around(MASTER, "the journal is opened", f"{_M}.journal.sqlite.journal", "SqliteJournal.open", once=True),
    *_around(MASTER, "the listeners are opened", f"{_M}.server", "Master._listen", once=True),
    *_around(AGENT, "hello", f"{_W}.master_stream", "MasterStream.hello", AFTER, once=True),
    *_around(AGENT, "leases come", f"{_W}.master_stream", "MasterStream.received"),
    *_around(AGENT, "a batch goes to the engine", f"{_W}.processes.host", "EngineHost.send"),
    *_around(AGENT, "the agent reads its engine", f"{_W}.processes.process", "EngineProcess.read"),
    *_around(AGENT, "reports leave", f"{_W}.session.session", "Session.take_frame"),
    *_around(ENGINE, "a batch is taken in", f"{_W}.engine.runtime", "Runtime._prepared", AFTER),
    *_around(ENGINE, "a task begins", f"{_W}.engine.reporter", "BatchReporter.begin", AFTER),
    *_around(ENGINE, "a partial output", f"{_W}.engine.reporter", "BatchReporter.partial"),
    *_around(ENGINE, "a result", f"{_W}.engine.reporter", "BatchReporter.succeed"),
    *_around(ENGINE, "the engine writes to the agent", f"{_W}.engine.channel", "AgentChannel.send"),
]
BY_NAME = {point.name: point for point in FAILPOINTS}


def variable(point: Failpoint, call: int, record: Path) -> dict[str, str]:
    """The environment that arms a failpoint: the process ends at its `call`-th call, and leaves its record there."""
    return {VARIABLE: f"{point.name}|{call}|{record}"}


def arm(*rooms: str) -> None:
    """Wraps the function that the environment names, if it is of these rooms and has not gone off yet."""
    words = os.environ.get(VARIABLE, "")
    if not words:
        return
    name, call, record = words.split("|")
    point = BY_NAME[name]
    if point.room in rooms and not Path(record).exists():
        owner, attribute = point.owner()
        counter = _Counter(point, int(call), Path(record))
        setattr(owner, attribute, _wrapped(getattr(owner, attribute), counter))


class _Counter:
    """Counts the calls and ends the process at the one that was asked for."""

    def __init__(self, point: Failpoint, call: int, record: Path) -> None:
        self.side = point.side
        self._name, self._room = point.name, point.room
        self._left = call
        self._record = record
        self._lock = threading.Lock()

    def count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                History(self._record).add("failpoint", name=self._name, room=self._room, pid=os.getpid())
                if self.side == FAILS:
                    raise OSError(ON_PURPOSE)
                os.kill(os.getpid(), signal.SIGKILL)


def _wrapped(function: Callable[..., Any], counter: _Counter) -> Callable[..., Any]:
    count = counter.count
    before, after = counter.side != AFTER, counter.side == AFTER

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if before:
            count()
        answer = function(*arguments, **named)
        if after:
            count()
        return answer

    @functools.wraps(function)
    async def call_async(*arguments: Any, **named: Any) -> Any:
        if before:
            count()
        answer = await function(*arguments, **named)
        if after:
            count()
        return answer

    return call_async if inspect.iscoroutinefunction(function) else call


def main() -> None:
    """Runs the module that the first argument names as its own command line would, armed."""
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    arm(MASTER, AGENT)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
