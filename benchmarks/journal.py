"""The SQLite journal's cost for a task: submit and settle, by batch size, alone and beside a busy Python thread.

    .venv/bin/python benchmarks/journal.py [--dir DIR] [--payload-bytes 100] [--tasks 60000] [--large]

For each batch size the journal's code writes transactions of as many submits, and as many settles of earlier tasks, to
a file with fsync. `cpu` is the CPU time of the writing thread for each task; `held` is the part in which it holds the
interpreter: everything except calls into SQLite, plus the binding of parameters, which is measured separately. The last
column is the rate beside a thread that computes and never releases the interpreter voluntarily, which is worse than any
event loop. The best of three runs counts; use a quiet machine.
"""

import argparse
import os
import resource
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from unittest import mock

from multigpu_master.errors import JournalError
from multigpu_master.journal.protocol import Entry, SettleRecord, SubmitRecord
from multigpu_master.journal.sqlite import connections
from multigpu_master.journal.sqlite.journal import SqliteJournal


def make(tasks: int, payload_bytes: int, request_ids: str) -> tuple[list[SubmitRecord], list[SettleRecord]]:
    payloads = [os.urandom(payload_bytes) for _ in range(min(256, max(2, (64 << 20) // max(payload_bytes, 1))))]
    bodies = [os.urandom(payload_bytes + 80) for _ in payloads]  # a serialized Outcome with a result of that size
    spec = os.urandom(60)
    now = time.time()
    ids = ["" if request_ids == "none" else f"c3f1a9d07b52-{i:09d}" for i in range(tasks)]
    if request_ids == "random":
        ids = [os.urandom(16).hex() for _ in range(tasks)]
    submits = [SubmitRecord(i + 1, ids[i], spec, payloads[i % len(payloads)], "", 1, now) for i in range(tasks)]
    settles = [
        SettleRecord(
            i + 1,
            ids[i],
            1,
            "default",
            "echo",
            "",
            "worker-host-1234",
            now,
            now,
            now + 3600,
            bodies[i % len(bodies)],
            None,
        )
        for i in range(tasks)
    ]
    return submits, settles


class CountingConnection:
    """A writer's connection that measures the CPU time spent in calls to SQLite, and counts them."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.cpu_s = 0.0
        self.calls = 0

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> sqlite3.Cursor:
        before = time.thread_time()
        try:
            return self._connection.execute(sql, parameters)
        finally:
            self.cpu_s += time.thread_time() - before
            self.calls += 1

    def close(self) -> None:
        self._connection.close()


class Bench:
    """A journal in a new directory, and what writing to it took."""

    def __init__(self, directory: Path, *, count: bool = False) -> None:
        self.directory = Path(tempfile.mkdtemp(dir=directory))
        self.done = threading.Semaphore(0)
        self.transactions = 0
        self.cpu_s = 0.0  # of the journal's thread since it began, at the last commit
        self.journal = SqliteJournal(self.directory / "data", size_max_bytes=1 << 40)
        connect = connections.connect_writer
        with mock.patch.object(connections, "connect_writer", lambda path: self.wrap(connect(path), count=count)):
            list(self.journal.open(self.committed).tasks)

    def wrap(self, connection: sqlite3.Connection, *, count: bool) -> sqlite3.Connection | CountingConnection:
        self.counting = CountingConnection(connection)
        return self.counting if count else connection

    def committed(self, entries: Sequence[Entry], _: int, error: JournalError | None) -> None:
        assert error is None, error
        self.transactions += 1
        self.cpu_s = time.thread_time()
        self.done.release(len(entries))

    def close(self) -> None:
        self.journal.close(60)
        shutil.rmtree(self.directory)

    def run(self, submits: list[SubmitRecord], settles: list[SettleRecord], batch: int, ahead: int) -> float:
        """Batches of submits, each with the settles of the batch before, `ahead` of them under way. Seconds."""
        started = time.perf_counter()
        under_way = 0
        for at in range(0, len(submits) + batch, batch):
            for entry in (Entry(submits=submits[at : at + batch]), Entry(settles=settles[max(at - batch, 0) : at])):
                if entry.submits or entry.settles:
                    self.journal.append(entry)
                    under_way += 1
            while under_way > 2 * ahead:
                self.done.acquire()
                under_way -= 1
        for _ in range(under_way):
            self.done.acquire()
        return time.perf_counter() - started


class Busy:
    """A thread that computes and never waits."""

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin)
        self._thread.start()
        return self

    def _spin(self) -> None:
        while not self._stop.is_set():
            sum(range(50))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure_binding(batch: int) -> float:
    """Seconds to hand a task's and an outcome's values to SQLite: the part of a call that holds the interpreter."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    submits, settles = make(batch, 100, "counted")
    values: list[object] = []
    for s, o in zip(submits, settles, strict=True):
        values += (s.task_id, s.request_id, s.partition_key, s.units, s.submit_time_s, s.spec, s.payload)
        values += (o.task_id, o.task_id, o.request_id, o.state, o.queue, o.kind, o.model, o.worker_id)
        values += (o.submit_time_s, o.settle_time_s, o.expire_time_s, o.body)
    row = f"({','.join('?' * (len(values) // batch))})"
    sql = f"SELECT * FROM (VALUES {','.join([row] * batch)}) LIMIT 0"  # takes them, and does nothing
    best = float("inf")
    for _ in range(20):
        before = time.thread_time()
        connection.execute(sql, values).close()
        best = min(best, time.thread_time() - before)
    connection.close()
    return best / batch


def small(directory: Path, tasks: int, payload_bytes: int) -> None:
    binding_s = measure_binding(1024)
    print(f"{payload_bytes}-byte payloads; us of CPU a task (submit + settle); binding alone {binding_s * 1e6:.2f}")
    print("request_ids   batch   tasks/s    cpu   held   calls/txn   tasks/s beside a busy thread")
    cases = [("counted", n) for n in (1, 16, 256, 4096)] + [("none", 256), ("random", 256)]
    for request_ids, batch in cases:
        count = min(tasks, batch * 400)
        submits, settles = make(count, payload_bytes, request_ids)
        runs: list[tuple[float, ...]] = []
        for _ in range(3):
            bench = Bench(directory, count=True)
            took_s = bench.run(submits, settles, batch, 1)
            held_s = bench.cpu_s - bench.counting.cpu_s + binding_s * count
            runs.append((bench.cpu_s, took_s, held_s, bench.counting.calls / bench.transactions))
            bench.close()
        cpu_s, took_s, held_s, calls = min(runs)
        few = min(count, batch * 60)
        bench = Bench(directory)
        with Busy():
            beside_s = bench.run(submits[:few], settles[:few], batch, 1)
        bench.close()
        print(
            f"{request_ids:11} {batch:7} {count / took_s:9.0f} {cpu_s / count * 1e6:6.2f} {held_s / count * 1e6:6.2f} "
            f"{calls:11.1f} {few / beside_s:12.0f}"
        )


def large(directory: Path) -> None:
    size, count = 1 << 20, 200
    submits, settles = make(count, size, "counted")
    for batch in (1, 8):
        bench = Bench(directory)
        took = bench.run(submits, settles, batch, 2)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(
            f"1 MiB in and out, batches of {batch}: {count / took:.0f} tasks/s, "
            f"{2 * count * size / took / 1e6:.0f} MB/s, {bench.cpu_s / count * 1e6:.0f} us of CPU a task; "
            f"{usage.ru_maxrss >> 10} MiB resident"
        )
        bench.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where the journals are made")
    parser.add_argument("--payload-bytes", type=int, default=100)
    parser.add_argument("--tasks", type=int, default=60_000)
    parser.add_argument("--large", action="store_true", help="payloads of 1 MiB instead")
    arguments = parser.parse_args()
    print(f"SQLite {sqlite3.sqlite_version}, {os.cpu_count()} cores, {arguments.dir}")
    if arguments.large:
        large(arguments.dir)
    else:
        small(arguments.dir, arguments.tasks, arguments.payload_bytes)


if __name__ == "__main__":
    main()
