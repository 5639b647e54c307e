"""A benchmark: loads the model, measures the idle devices, warms up, and measures until the result is narrow enough.

The rules of MLPerf Power (https://github.com/mlcommons/inference_policies/blob/master/power_measurement.adoc) are
followed where they apply to a host's own sensors: performance and energy are of the same run; only the measured phase
counts, and it lasts at least 60 s by default; nothing else should run on the devices. MLPerf measures the whole system
at the wall with an external analyzer, which this does not.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from multigpu_worker.energy.config import BenchmarkConfig
from multigpu_worker.energy.intervals import BLOCKS_MIN, Interval, ratio
from multigpu_worker.energy.recording import Recorder
from multigpu_worker.energy.workloads import Request, Workload

# Requests are counted in blocks of at least this many seconds, because a counter moves only every 0.1 s.
BLOCK_S = 2.0
WARM_UP_BATCHES = 3
FAILURES_MAX = 3


class RunError(Exception):
    """The benchmark can't go on; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long to measure. Times in seconds."""

    idle_s: float = 10.0
    least_s: float = 60.0
    # Repetitions end after this time, however wide the interval is.
    most_s: float = 600.0
    # Half the width of the 95 % interval of the energy of a request, as a fraction of it.
    width: float = 0.05


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Block:
    """Consecutive requests. Without energy while their devices report none, or have not been read up to its end."""

    begin_s: float
    end_s: float
    requests: list[Request]
    joules: float | None = None


@dataclass(slots=True)
class Run:
    """What was run and recorded."""

    recorder: Recorder
    phases: list[Phase] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def requests(self) -> list[Request]:
        return [request for block in self.blocks for request in block.requests]

    def of_requests(self) -> Interval | None:
        """Joules for each request that succeeded; None: not known yet, or not measured."""
        done = [block for block in self.blocks if block.joules is not None]
        return ratio([b.joules or 0.0 for b in done], [sum(not r.error for r in b.requests) for b in done])


Tell = Callable[[str, float, float], None]  # phase, done, of


class Benchmark:
    """Calls `tell` with the progress."""

    def __init__(
        self, config: BenchmarkConfig, length: Length, recorder: Recorder, workload: Workload, tell: Tell
    ) -> None:
        self._batch = config.scenario.input_shapes.batch_size
        self._length = length
        self._recorder = recorder
        self._workload = workload
        self._tell = tell
        self._failures = 0
        self._run = Run(recorder)

    def run(self, prompts: Sequence[str], wait: Callable[[float], None]) -> Run:
        """`wait`: sleeps. Raises RunError, RecordingError or WorkloadError."""
        self._recorder.begin()
        try:
            self._during("load", self._workload.load)
            self._during("idle", lambda: self._idle(wait))
            self._during("warm-up", lambda: self._warm_up(prompts))
            self._during("measured", lambda: self._measure(prompts))
            self._recorder.wait_until_covered(self._run.phase("measured").end_s, wait)
        finally:
            self._recorder.end()
        self._weigh_blocks()
        return self._run

    def _during(self, name: str, do: Callable[[], None]) -> None:
        begin_s = self._recorder.now_s()
        self._tell(name, 0.0, 0.0)
        do()
        self._run.phases.append(Phase(name, begin_s, self._recorder.now_s()))

    def _idle(self, wait: Callable[[float], None]) -> None:
        begin_s = self._recorder.now_s()
        while (done_s := self._recorder.now_s() - begin_s) < self._length.idle_s:
            self._tell("idle", done_s, self._length.idle_s)
            wait(min(0.2, self._length.idle_s - done_s))
            self._recorder.check()

    def _warm_up(self, prompts: Sequence[str]) -> None:
        batches = itertools.islice(_batches(prompts, self._batch), WARM_UP_BATCHES)
        for n, (batch, _) in enumerate(batches):
            self._tell("warm-up", n, WARM_UP_BATCHES)
            self._ask(batch)

    def _measure(self, prompts: Sequence[str]) -> None:
        begin_s = since_s = self._recorder.now_s()
        requests: list[Request] = []
        passed = False
        for batch, last in _batches(prompts, self._batch):
            requests += self._ask(batch)
            passed = passed or last
            now_s = self._recorder.now_s()
            self._tell("measured", now_s - begin_s, self._length.least_s)
            if now_s - since_s >= BLOCK_S:
                self._run.blocks.append(Block(since_s, now_s, requests))
                since_s, requests = now_s, []
                self._weigh_blocks()
                if passed and self._enough(now_s - begin_s):
                    return

    def _enough(self, took_s: float) -> bool:
        if took_s >= self._length.most_s:
            return True
        if took_s < self._length.least_s or len(self._run.blocks) < BLOCKS_MIN:
            return False
        interval = self._run.of_requests()
        measurable = all(recording.readings is not None for recording in self._recorder.recordings)
        return not measurable or (interval is not None and interval.width <= self._length.width)

    def _ask(self, batch: Sequence[str]) -> list[Request]:
        self._recorder.check()
        requests = self._workload.run(batch)
        for request in requests:
            self._failures = self._failures + 1 if request.error else 0
            if self._failures >= FAILURES_MAX:
                raise RunError(f"{FAILURES_MAX} requests have failed one after the other; the last: {request.error}")
        return requests

    def _weigh_blocks(self) -> None:
        """Finds the energy of the blocks that have been recorded to their end."""
        for block in self._run.blocks:
            if block.joules is None and self._recorder.covers(block.end_s):
                energy = self._recorder.energy(block.begin_s, block.end_s)
                block.joules = energy.joules if energy is not None else None


def _batches(prompts: Sequence[str], size: int) -> "itertools.chain[tuple[Sequence[str], bool]]":
    """Batches of the prompts, over and over; and whether each is the last of its pass."""
    starts = range(0, len(prompts), size)
    return itertools.chain.from_iterable(
        ((prompts[at : at + size], at + size >= len(prompts)) for at in starts) for _ in itertools.count()
    )
