"""The reporter of a batch, with the agent's end of its socket."""

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from multigpu_worker.engine import runtime
from multigpu_worker.engine.channel import AgentChannel
from multigpu_worker.engine.leases import Leases
from multigpu_worker.engine.reporter import BatchReporter, Reporting, flush_forever
from multigpu_worker.engine.runtime import Runtime
from multigpu_worker.engine.work import Work
from multigpu_worker.engines.base import Batch, EngineSettings, Item
from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.ipc.blobs import BlobMemory
from multigpu_worker.processes.ipc.slots import SlotPage


class Ends:
    """Both ends of an engine's socket, and what the engine's reporters share."""

    def __init__(self) -> None:
        self.agent, engine = socket.socketpair()
        self.agent.settimeout(10.0)
        blobs = BlobMemory.create()
        channel = AgentChannel(engine, blobs)
        self.leases = Leases(channel)
        limits: Any = {"result_bytes_max": 1 << 20, "embedding_cache": dict, "unflushed": queue.SimpleQueue()}
        self.shared = Reporting(channel=channel, leases=self.leases, page=SlotPage.create(1), **limits)
        self._decoder = frames.Decoder(blobs.up)

    def read(self) -> Iterator[frames.Message]:
        while True:
            for message, _ in self._decoder.feed(self.agent):
                yield message

    def run(
        self, engine: Any, *lease_ids: int, lost: tuple[int, ...] = (), recalled: tuple[int, ...] = ()
    ) -> list[Any]:
        """Run a batch as a slot does. Returns what the agent got: ("given back" or the error's type, lease)."""
        items = [Item(n, n, 1, b"", 1, b"", 0) for n in lease_ids]
        given_back = self.leases.add_batch(lease_ids)
        kept = Batch("k", "", {}, "", [item for item in items if item.lease_id not in lost])
        gone = [(item, "gone") for item in items if item.lease_id in lost]
        work = Work(1, kept, engine, None, gone, None, given_back)
        reporter = BatchReporter(self.shared, work, 0)
        self.leases.give_back(recalled)
        runtime._run_batch(work, reporter)
        reporter.begin_all()
        reporter.finish()
        got: list[Any] = []
        for message in self.read():
            if message[0] == "given_back":
                got += [("given back", lease_id) for lease_id in message[1]]
            else:
                got += [("", row[0]) for row in message[4]] + [(row[1], row[0]) for row in message[5]]
                if message[10]:
                    return got
        raise AssertionError


class OneByOne:
    one_by_one = True

    def __init__(self, raises_at: int = 0, *, begins: bool = True) -> None:
        self._raises_at = raises_at
        self._begins = begins

    def run(self, batch: Batch, _prepared: object, reporter: BatchReporter) -> None:
        for item in batch.items:
            if self._begins:
                reporter.begin(item)
            if item.lease_id == self._raises_at:
                raise TypeError("no")
            reporter.succeed(item, b"")


def test_a_lease_that_was_given_back_is_not_reported_as_failed() -> None:
    """The agent has it no more, and would end the engine for a report of a lease that is not in the batch."""
    assert Ends().run(OneByOne(), 1, 2, lost=(2,), recalled=(2,)) == [("given back", 2), ("", 1)]
    got = Ends().run(OneByOne(raises_at=1), 1, 2, recalled=(2,))
    assert got == [("given back", 2), ("TypeError", 1)]


def test_tasks_that_have_not_begun_when_the_engine_raises_are_given_back() -> None:
    ends = Ends()
    assert ends.run(OneByOne(raises_at=2), 1, 2, 3, 4) == [
        ("", 1),
        ("TypeError", 2),
        ("given back", 3),
        ("given back", 4),
    ]
    assert not ends.leases.unbegun


def test_an_engine_that_raises_between_two_tasks_fails_none_that_has_not_begun(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Between(OneByOne):
        def run(self, batch: Batch, _prepared: object, reporter: BatchReporter) -> None:
            reporter.begin(batch.items[0])
            reporter.succeed(batch.items[0], b"")
            raise TypeError("between")

    assert Ends().run(Between(), 1, 2, 3) == [("", 1), ("given back", 2), ("given back", 3)]
    assert "TypeError: between" in capfd.readouterr().err, "no task's error says it"


def test_an_engine_that_raises_before_any_task_begins_fails_them_all() -> None:
    """Given back, they would come again and again."""
    got = Ends().run(OneByOne(raises_at=1, begins=False), 1, 2)
    assert got == [("TypeError", 1), ("TypeError", 2)]
    got = Ends().run(OneByOne(raises_at=1, begins=False), 1, 2, 3, 4, lost=(3,), recalled=(4,))
    assert got == [("given back", 4), ("PayloadLost", 3), ("TypeError", 1), ("TypeError", 2)]


def test_results_of_short_tasks_do_not_wait_for_a_long_one() -> None:
    """The engine begins all tasks at once, as embed, infer and classify do, and computes in steps."""
    ends = Ends()
    threading.Thread(target=flush_forever, args=(ends.shared.unflushed,), daemon=True).start()
    items = [Item(n, n, 1, b"", 1, b"", 0) for n in range(1, 9)]
    reporter = BatchReporter(ends.shared, Work(1, Batch("k", "", {}, "", items), None, None, [], None, set()), 0)
    reporter.begin_all()
    for item in items[:-1]:
        reporter.succeed(item, b"done")
    reporter.beat()  # the long task goes on
    ended: set[int] = set()
    received = ends.read()
    while len(ended) < 7:
        message = next(received)
        ended |= {row[0] for row in message[4]} if message[0] == "reports" else set()
    assert ended == set(range(1, 8))


def test_a_cancelled_lease_is_forgotten_with_its_batch_though_another_batch_waits() -> None:
    """An engine that always had a batch to prepare kept the ids of all leases that were ever cancelled."""
    leases = Ends().leases
    for lease_id in (1, 2):
        leases.add_batch([lease_id])
    leases.cancelled.update((1, 2))
    leases.end_batch([1], set())
    assert leases.cancelled == {2}


def test_a_lease_that_came_again_in_another_batch_stays_cancelled() -> None:
    """It was given back by the first, whose end must not undo that it is cancelled in the second."""
    ends = Ends()  # the agent's end stays open
    leases = ends.leases
    given_back = leases.add_batch([1])
    leases.give_back([1])
    leases.add_batch([1])
    leases.cancelled.add(1)
    leases.end_batch([1], given_back)
    assert leases.cancelled == {1}


def test_engines_know_how_large_a_result_may_be() -> None:
    settings = EngineSettings(device="cpu", slots=2, threads=1)
    runtime = Runtime(Ends().shared.channel, SlotPage.create(2), settings, result_bytes_max=7)
    assert runtime.settings.result_bytes_max == 7


@pytest.mark.parametrize("thread", ["slot", "flusher"])
def test_a_thread_of_the_engine_that_ends_ends_the_process(monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
    """Memory ran out as a slot reported an error: its thread ended, and its tasks stayed in the engine for ever."""
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()

    def end(code: int) -> None:
        codes.put(code)
        threading.Event().wait()

    def fail(*_: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(BatchReporter, "finish" if thread == "slot" else "flush", fail)
    ends = Ends()
    settings = EngineSettings(device="cpu", slots=2, threads=1)
    engine = Runtime(ends.shared.channel, SlotPage.create(2), settings, result_bytes_max=1)
    work = Work(1, Batch("k", "", {}, "", []), None, None, [], None, set())
    engine._start_threads()
    if thread == "slot":
        engine._work.put(work)
    else:
        engine._reporting.unflushed.put(BatchReporter(ends.shared, work, 0))
    deadline_s = time.monotonic() + 10.0
    while codes.empty() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not codes.empty()
    assert codes.get() == runtime.EXIT_BROKEN
