"""The core alone: µs for each task through submit, dispatch, report and commit, by length of the queue and size of the
fleet, and the memory of a queued task. `python -m benchmarks.core`.

CPU time of this process, which other load disturbs less than the clock. Without wire, journal and event loop, which
have their own benchmarks.
"""

import argparse
import gc
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from multigpu_master.core import events as ev
from multigpu_master.core.model import Lease, Task
from multigpu_master.core.scheduler import Core, Limits
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import Capability, Telemetry, WorkerInfo
from multigpu_master.strategies.registry import load_strategies

FRAME = 256
PAYLOAD = bytes(100)
SPEC = Spec(kind="noop")
STRATEGIES = load_strategies()


@dataclass
class Rig:
    """A core and the simplest possible surroundings."""

    workers: int = 2
    strategy: str = "auto"
    keys: int = 0  # how many partition keys the tasks have
    now: float = 1000.0
    us: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = Core(STRATEGIES, Limits(), 1, lambda: 0.5, self.strategy)
        self.held: dict[int, list[Lease]] = {}
        self.ids = count()
        for i in range(self.workers):
            info = WorkerInfo(worker_id=f"w{i}", capabilities=(Capability(kind="noop"),), memory_total_bytes=1 << 30)
            self.held[i + 1] = []
            self.do("hello", ev.Hello(i + 1, info))
            self.do("hello", ev.Heartbeat(i + 1, [], 0, Telemetry(memory_total_bytes=1 << 30, memory_used_bytes=i)))

    def do(self, name: str, event: ev.Event) -> None:
        """Feeds an event, and takes the time."""
        began = time.process_time()
        commands = self.core.handle(event, self.now)
        self.us[name] = self.us.get(name, 0.0) + (time.process_time() - began) * 1e6
        for command in commands:
            if isinstance(command, ev.Dispatch):
                self.held[command.session] += command.leases
            elif isinstance(command, ev.RenewIds):
                self.core.handle(ev.IdsRenewed(self.core.ids.end), self.now)
            elif isinstance(command, ev.Settled):
                self.do("committed", ev.SettlesDone(command.tasks))

    def tasks(self, n: int) -> list[Task]:
        keys = self.keys
        return [Task(SPEC, f"0123456789ab-{i:011d}", bytes(100), f"k{i % keys}" if keys else "")
                for i, _ in zip(self.ids, range(n), strict=False)]  # fmt: skip

    def submit(self, n: int) -> None:
        for done in range(0, n, FRAME):
            frame = self.tasks(min(FRAME, n - done))
            self.do("submit", ev.Submit(SPEC, frame, 1))

    def report(self) -> int:
        """Each worker reports up to a frame of its oldest leases."""
        self.now += 0.005
        reported = 0
        for session, leases in self.held.items():
            frame, self.held[session] = leases[:FRAME], leases[FRAME:]
            if frame:
                succeeded = [x.lease_id for x in frame]
                results = [b"done"] * len(frame)
                reports = ev.Reports(session, succeeded, results, start_s=self.now - 0.004, finish_s=self.now)
                self.do("report", reports)
                reported += len(frame)
        return reported


def steady(rig: Rig, n: int) -> dict[str, float]:
    """n tasks through a rig whose queue keeps its length; microseconds a task by event."""
    # The windows open with the first reports.
    for _ in range(20):
        rig.submit(rig.report())
    rig.us.clear()
    done = 0
    while done < n:
        reported = rig.report()
        rig.submit(reported)
        done += reported
    return {name: us / done for name, us in rig.us.items()}


def rows(quick: bool) -> Iterator[tuple[str, Rig, int]]:
    """What is measured: a title, a rig, and how many tasks wait."""
    million = 100_000 if quick else 1_000_000
    yield "2 workers, 4,000 queued", Rig(), 4_000
    yield "2 workers, 50,000 queued", Rig(), 50_000
    yield f"2 workers, {million:,} queued", Rig(), million
    yield "20 workers, 50,000 queued", Rig(workers=20), 50_000
    yield "200 workers, 250,000 queued", Rig(workers=200), 100_000 if quick else 250_000
    for name in sorted(STRATEGIES):
        yield f"{name}, 2 workers, 50,000 queued", Rig(strategy=name), 50_000
    yield "static_partition, 1,000 keys", Rig(strategy="static_partition", keys=1_000), 50_000
    yield "auto, 1,000 keys", Rig(keys=1_000), 50_000


def memory(n: int) -> float:
    """Bytes of resident memory for each of n queued tasks of 100 bytes."""
    rig = Rig()
    rig.submit(1_000)
    gc.collect()
    before = _resident_bytes()
    rig.submit(n)
    return (_resident_bytes() - before) / n


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.core", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the queue lengths")
    parser.add_argument("--tasks", type=int, default=50_000, help="tasks measured for each row")
    args = parser.parse_args()
    gc.disable()  # a million tasks make a collection slow, and the core makes no garbage in cycles
    n = 100_000 if args.quick else 1_000_000
    print(f"memory: {memory(n):.0f} bytes for each of {n:,} queued tasks of 100 bytes")
    print(f"{'microseconds of CPU a task':44}{'submit':>9}{'report':>9}{'commit':>9}{'all':>9}")
    for title, rig, queued in rows(args.quick):
        rig.submit(queued)
        us = steady(rig, args.tasks)
        parts = [us["submit"], us["report"], us["committed"], sum(us.values())]
        print(title.ljust(44) + "".join(f"{part:9.2f}" for part in parts), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
