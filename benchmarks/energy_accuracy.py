"""How often the energy that the energy benchmark measures lies within its uncertainty.

Eight simulated GPUs, read through NVML's real bindings, change their power at random times. This program sets the
power, so it knows the true energy.

    python -m benchmarks.energy_accuracy --windows 1000
"""

import argparse
import bisect
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from multigpu_worker.device.open import open_device
from multigpu_worker.energy.recording import Recorder

from tests.fakes.gpus import VARIABLE, SimulatedGpus

GPUS = 8


class Load(threading.Thread):
    """Sets the power of a GPU at random times."""

    def __init__(self, gpus: SimulatedGpus, number: int) -> None:
        super().__init__(daemon=True)
        self._gpus, self._number, self._random = gpus, number, random.Random(number)
        self.ended = threading.Event()
        self.powers: list[tuple[float, float]] = []  # since when, on the monotonic clock, and watts
        self._set()

    def _set(self) -> None:
        watts = self._random.uniform(70, 700)
        self._gpus.power(self._number, watts)
        self.powers.append((time.monotonic(), watts))

    def run(self) -> None:
        while not self.ended.wait(self._random.expovariate(1 / self._random.choice([0.1, 0.5, 2.0]))):
            self._set()

    def joules(self, begin_s: float, end_s: float) -> float:
        """The true energy."""
        first = bisect.bisect_right(self.powers, (begin_s, float("inf"))) - 1
        spans = zip(self.powers[first:], [*self.powers[first + 1 :], (end_s, 0.0)], strict=True)
        return sum(max(0.0, min(b, end_s) - max(a, begin_s)) * watts for (a, watts), (b, _) in spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=1000, help="of 0.5 to 3 s, on all GPUs together")
    asked = parser.parse_args()
    if VARIABLE in os.environ:
        measure(SimulatedGpus.attached(), -(-asked.windows // GPUS))
        return
    with tempfile.TemporaryDirectory() as folder:  # the library of the driver is found by a new process only
        gpus = SimulatedGpus(Path(folder) / "gpus", n=GPUS)
        for n in range(GPUS):
            gpus.run_energy(n, period_s=random.Random(n).uniform(0.02, 0.1))
        command = [sys.executable, "-m", "benchmarks.energy_accuracy", "--windows", str(asked.windows)]
        sys.exit(subprocess.run(command, env={**os.environ, **gpus.env()}, check=False).returncode)


def measure(gpus: SimulatedGpus, rounds: int) -> None:

    loads = [Load(gpus, n) for n in range(GPUS)]
    for load in loads:
        load.start()
    recorder = Recorder([open_device(f"cuda:{n}") for n in range(GPUS)], [])
    zero_s = time.monotonic() - recorder.now_s()
    recorder.begin()
    time.sleep(1.0)
    chosen, windows = random.Random(0), list[tuple[float, float]]()
    for _ in range(rounds):
        begin_s = recorder.now_s()
        time.sleep(chosen.uniform(0.5, 3.0))
        windows.append((begin_s, recorder.now_s()))
    time.sleep(0.5)
    recorder.end()
    inside, shares, errors = 0, list[float](), list[float]()
    for recording, load in zip(recorder.recordings, loads, strict=True):
        load.ended.set()
        assert recording.readings is not None
        for begin_s, end_s in windows:
            found, true = recording.readings.energy(begin_s, end_s), load.joules(zero_s + begin_s, zero_s + end_s)
            inside += abs(found.joules - true) <= found.uncertainty_joules
            shares.append(found.uncertainty_joules / found.joules)
            errors.append(abs(found.joules - true) / true)
    count = len(shares)
    median = sorted(shares)[count // 2]
    print(f"{count} windows: {inside / count:.1%} within the uncertainty, whose median is {median:.1%}")
    print(f"error: {sorted(errors)[count // 2]:.2%} in the median, {max(errors):.1%} at most")


if __name__ == "__main__":
    main()
