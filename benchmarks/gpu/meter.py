"""Utilisation and energy of a device between two instants, sampled ten times a second.

For a GPU by NVML: utilisation, and the energy counter, or without one the power. For a CPU the share of time that the
host's cores were busy, without energy.
"""

import bisect
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, Self

INTERVAL_S = 0.1


class Sample(NamedTuple):
    at: float
    # 0 to 1 of a GPU; of a CPU the seconds its cores were busy so far.
    busy: float
    joules: float | None
    watts: float | None


class Use(NamedTuple):
    """0 to 1, and joules; None: not told."""

    busy: float | None
    joules: float | None


class Meter:
    """Samples "cpu" or "cuda:N" in a thread of its own, for the time of a `with`."""

    def __init__(self, device: str) -> None:
        self._nvml: Any = None
        if device != "cpu":
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(int(device.removeprefix("cuda:")))
        self._cores = _cores()
        self._samples: list[Sample] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        if self._nvml is not None:
            self._nvml.nvmlShutdown()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self._samples.append(self._sample())

    def _sample(self) -> Sample:
        if self._nvml is None:
            return Sample(time.perf_counter(), _busy_seconds(), None, None)
        busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        joules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        watts = self._ask("nvmlDeviceGetPowerUsage")
        return Sample(time.perf_counter(), busy, joules, watts)

    def _ask(self, function: str) -> float | None:
        try:
            return float(getattr(self._nvml, function)(self._handle)) / 1000  # mJ, mW
        except self._nvml.NVMLError:
            return None

    def use(self, begin: float, end: float) -> Use:
        """Between two instants of time.perf_counter; nothing is told of less than three samples."""
        times = [sample.at for sample in self._samples]
        window = self._samples[bisect.bisect_left(times, begin) : bisect.bisect_right(times, end)]
        if len(window) < 3:
            return Use(None, None)
        first, last = window[0], window[-1]
        seconds = last.at - first.at
        if self._nvml is None:
            return Use((last.busy - first.busy) / seconds / self._cores, None)
        busy = sum(sample.busy for sample in window) / len(window)
        if first.joules is not None and last.joules is not None:
            return Use(busy, (last.joules - first.joules) * (end - begin) / seconds)
        watts = [sample.watts for sample in window if sample.watts is not None]
        return Use(busy, sum(watts) / len(watts) * (end - begin) if watts else None)


def _cores() -> int:
    return sum(line.startswith("cpu") for line in Path("/proc/stat").read_text().splitlines()) - 1


def _busy_seconds() -> float:
    """Of all cores so far: user, nice, system, irq, softirq, steal; proc(5)."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / 100
