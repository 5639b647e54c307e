"""`python -m benchmarks.load.core`: what an event costs the real core as the fleet and the queue grow, up to 10,000
workers and 10,000,000 tasks.

The core is the master's own. Around it is only what feeds it: simulated workers, each of which holds what it was given
and reports all of it when its turn comes, and a journal that has written everything at once. No wire, no clock, no
invariants: tests/sim has those. Times are of this process's CPU, in microseconds; the collector is off, as it is,
nearly, in the master.
"""

import argparse
import gc
import resource
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Task
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Telemetry, WorkerInfo
from multigpu_master.strategies.registry import load_strategies

STRATEGIES = load_strategies()
FRAME = 256
WINDOW = 16
KEYS = 256  # of the tasks, for strategies that go by them
WORKERS = (10, 100, 1_000, 10_000)
QUEUED = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
MEASURED = 40_000  # tasks through a core for each row
PROGRESS_S = 5.0


class Fleet:
    """A core, its simulated workers, and the CPU time of each kind of event."""

    def __init__(
        self, workers: int, strategy: str = "auto", kinds: int = 1, queues: int = 1, frame: int = FRAME
    ) -> None:  # fmt: skip
        self.core = Core(STRATEGIES, Limits(tasks_max=20_000_000, bytes_max=1 << 40), 1, lambda: 0.5, strategy)
        self.specs = [
            Spec(kind=f"kind{i % kinds}", queue=f"queue{i % queues}", wait_for_worker=True)
            for i in range(max(kinds, queues))
        ]
        self._frame = frame
        self.workers = workers
        self.now = 1000.0
        self.held: dict[int, list[Lease]] = {}
        self.cpu_s: dict[str, float] = {}
        self.count: dict[str, int] = {}
        self.submitted = self.settled = 0
        self._keys = KEYS if STRATEGIES[strategy].pinned else 0
        self._busy: deque[int] = deque()  # sessions that hold something, in the order of their turns

    def join(self) -> None:
        """Every worker says hello, one after the other."""
        capabilities = tuple(Capability(kind=kind) for kind in dict.fromkeys(s.kind for s in self.specs))
        for session in range(1, self.workers + 1):
            info = WorkerInfo(
                worker_id=f"w{session}", capabilities=capabilities, window_tasks=WINDOW, slots=WINDOW,
                memory_total_bytes=1 << 30,
            )  # fmt: skip
            self.held[session] = []
            self._do("join", ev.Hello(session, info), 1)

    def submit(self, n: int) -> None:
        """n new tasks, in frames, of each spec in turn."""
        told_s = time.monotonic()
        for done in range(0, n, self._frame):
            spec = self.specs[self.submitted // self._frame % len(self.specs)]
            size = min(self._frame, n - done)
            tasks = [self._task(spec, self.submitted + i) for i in range(size)]
            self.submitted += size
            self._do("submit", ev.Submit(spec, tasks, 1), size)
            if time.monotonic() - told_s > PROGRESS_S:
                told_s = time.monotonic()
                print(f"  {done:,} of {n:,} submitted", file=sys.stderr, flush=True)

    def _task(self, spec: Spec, n: int) -> Task:
        return Task(spec, f"r{n:012}", b"%0100d" % n, f"key{n % self._keys}" if self._keys else "")

    def report(self, n: int) -> None:
        """The next workers report all they hold, until n tasks have settled; each report makes room for as many."""
        aim = self.settled + n
        while self.settled < aim:
            session = self._busy.popleft()
            self.now += 0.5 / self.workers
            leases, self.held[session] = self.held[session], []
            lease_ids = [x.lease_id for x in leases]
            event = ev.Reports(session, lease_ids, [b"done"] * len(leases), "", (), self.now - 0.4, self.now)
            self._do("report and dispatch", event, len(leases))

    def heartbeats(self, n: int) -> None:
        for session in [1 + i % self.workers for i in range(n)]:
            held = [ev.HeldLease(x.lease_id, x.task.task_id, x.attempt, running=True) for x in self.held[session]]
            telemetry = Telemetry(memory_total_bytes=1 << 30, memory_used_bytes=session)
            self._do("heartbeat", ev.Heartbeat(session, held, 1 << 30, telemetry), 1)

    def us(self, name: str) -> float:
        """What one task, or one event of a worker, cost."""
        return self.cpu_s.get(name, 0.0) * 1e6 / max(1, self.count.get(name, 0))

    def forget_times(self) -> None:
        self.cpu_s.clear()
        self.count.clear()

    def _do(self, name: str, event: ev.Event, size: int) -> None:
        began = time.process_time()
        commands = self.core.handle(event, self.now)
        self.cpu_s[name] = self.cpu_s.get(name, 0.0) + time.process_time() - began
        self.count[name] = self.count.get(name, 0) + size
        for command in commands:
            if isinstance(command, ev.Dispatch):
                if not self.held[command.session]:
                    self._busy.append(command.session)
                self.held[command.session] += command.leases
            elif isinstance(command, ev.RenewIds):
                self._do("renew", ev.IdsRenewed(self.core.ids.end), 1)
            elif isinstance(command, ev.Settled):
                self.settled += len(command.tasks)
                self._do("commit", ev.SettlesDone(command.tasks), len(command.tasks))


def row(workers: int, queued: int, strategy: str = "auto", kinds: int = 1, queues: int = 1, frame: int = FRAME) -> None:
    """A fleet joins an idle master, then works with so many tasks in the queue."""
    fleet = Fleet(workers, strategy, kinds, queues, frame)
    fleet.join()
    fleet.submit(workers * WINDOW + queued)
    # Each worker has to show its pace before its window opens.
    for _ in range(4):
        settled = fleet.settled
        fleet.report(workers * WINDOW // 4)
        fleet.submit(fleet.settled - settled)
    join_us = fleet.us("join")
    fleet.forget_times()
    done = 0
    while done < MEASURED:
        settled = fleet.settled
        fleet.report(FRAME)
        fleet.submit(fleet.settled - settled)
        done += fleet.settled - settled
    fleet.heartbeats(min(workers, 2_000))
    parts = [fleet.us(name) for name in ("submit", "report and dispatch", "commit")]
    waiting = fleet.core.ledger.unsettled - fleet.core.ledger.leased
    cells = [f"{workers:>8,}", f"{waiting:>11,}", f"{strategy:>17}", f"{kinds:>6}", f"{queues:>7}"]
    cells.append(f"{join_us:>10,.0f}")
    cells += [f"{us:>9.2f}" for us in (*parts, sum(parts))]
    print("".join(cells) + f"{fleet.us('heartbeat'):>11.1f}", flush=True)


def churn(workers: int, queued: int) -> None:
    """Workers that come back while tasks wait: each hello changes the fleet."""
    fleet = Fleet(workers)
    fleet.submit(queued)
    fleet.join()
    print(f"{workers:,} workers join while {queued:,} tasks wait: {fleet.us('join'):,.0f} us each", flush=True)


def drain(tasks: int, workers: int) -> None:
    """So many tasks at once, through the fleet, to the last."""
    fleet = Fleet(workers)
    began, before = time.process_time(), _resident_bytes()
    fleet.join()
    fleet.submit(tasks)
    took_s = time.process_time() - began
    taken = _resident_bytes() - before
    print(f"{tasks:,} tasks queued at once, {workers:,} workers: {taken / tasks:.0f} bytes of memory each, "
          f"{took_s * 1e6 / tasks:.1f} us of CPU each to make and submit", flush=True)  # fmt: skip
    began = time.process_time()
    tenth = max(1, tasks // 10)
    while fleet.settled < tasks:
        fleet.forget_times()
        fleet.report(min(tenth, tasks - fleet.settled))
        us = fleet.us("report and dispatch") + fleet.us("commit")
        print(f"  {fleet.settled:>11,} settled; the last {tenth:,} at {us:.2f} us each", flush=True)
    assert fleet.core.ledger.unsettled == 0, "everything has ended"
    assert fleet.settled == tasks, "each once"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    print(f"  drained in {time.process_time() - began:.0f} s of CPU; peak memory {peak:.1f} GiB", flush=True)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def rows(workers: Iterable[int], queued: Iterable[int]) -> None:
    print(f"{'workers':>8}{'queued':>11}{'strategy':>17}{'kinds':>6}{'queues':>7}{'join':>10}"
          f"{'submit':>9}{'dispatch':>9}{'commit':>9}{'a task':>9}{'heartbeat':>11}   (us of CPU)")  # fmt: skip
    biggest = max(queued)
    for n in workers:
        row(n, min(100_000, biggest))
        gc.collect()
    for n in queued:
        row(100, n)
        gc.collect()
    most = max(workers)
    for strategy in sorted(STRATEGIES):
        row(most, min(100_000, biggest), strategy)
        gc.collect()
    for kinds in (1, 50, 1_000):  # a task a frame, so that each is of another class than the last
        for queues in (1, 100, 10_000):
            row(min(workers), min(100_000, biggest), kinds=kinds, queues=queues, frame=1)
            gc.collect()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load.core", description=__doc__)
    parser.add_argument("--workers-max", type=int, default=max(WORKERS))
    parser.add_argument("--tasks-max", type=int, default=max(QUEUED))
    args = parser.parse_args()
    gc.disable()
    try:
        rows([n for n in WORKERS if n <= args.workers_max], [n for n in QUEUED if n <= args.tasks_max])
        churn(args.workers_max, min(100_000, args.tasks_max))
        drain(args.tasks_max, args.workers_max)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
