"""Records devices: a thread for each, which reads its sensors SAMPLES_PER_S times a second from `begin` to `end`."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from multigpu_worker.device.energy import EnergyMethod
from multigpu_worker.device.interface import Device, DeviceGoneError, Telemetry
from multigpu_worker.energy.windows import ZERO, Energy, Readings

SAMPLES_PER_S = 10.0
# How long `begin` and `end` wait for the drivers.
DRIVER_TIMEOUT_S = 5.0


class RecordingError(Exception):
    """A device can't be recorded; the message says why."""


@dataclass(slots=True)
class Recording:
    """What was read of one device. Times in seconds since the recorder was made."""

    device: Device
    # None: it reports neither its energy nor its power.
    readings: Readings | None
    times_s: list[float] = field(default_factory=list)
    samples: list[Telemetry] = field(default_factory=list)

    def within(self, begin_s: float, end_s: float) -> list[Telemetry]:
        return [s for t, s in zip(self.times_s, self.samples, strict=True) if begin_s <= t <= end_s]


class Recorder:
    """Times are on its clock, in seconds since it was made."""

    def __init__(self, devices: list[Device], beside: list[Device]) -> None:
        """`devices` compute, and their energy counts. `beside`: others, recorded for display."""
        self._begun_s = time.monotonic()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self.recordings = [Recording(device, _readings_of(device)) for device in devices]
        self.beside = [Recording(device, _readings_of(device)) for device in beside]
        self._all = [*self.recordings, *self.beside]
        self._threads = [
            threading.Thread(target=self._record, args=(recording,), name="energy-recorder", daemon=True)
            for recording in self._all
        ]

    def now_s(self) -> float:
        return time.monotonic() - self._begun_s

    def begin(self) -> None:
        """Returns once each device has been read. RecordingError: one can't be read."""
        for thread in self._threads:
            thread.start()
        self.wait_until_covered(0.0, time.sleep)

    def end(self) -> None:
        """Ends the recording, after a last sample. RecordingError: a driver does not answer."""
        self._ended.set()
        for thread in self._threads:
            thread.join(DRIVER_TIMEOUT_S)
        if any(thread.is_alive() for thread in self._threads):
            raise RecordingError(f"the driver of a device has not answered for {DRIVER_TIMEOUT_S:g} s")
        self.check()

    def check(self) -> None:
        """RecordingError: a device can't be read any more."""
        if self._error is not None:
            raise RecordingError(str(self._error)) from self._error

    def energy(self, begin_s: float, end_s: float) -> Energy | None:
        """Energy of the devices in this time, which must have been recorded. None: one of them reports none."""
        total = ZERO
        for recording in self.recordings:
            if recording.readings is None:
                return None
            total += recording.readings.energy(begin_s, end_s)
        return total

    def covers(self, time_s: float) -> bool:
        """Whether each device was read at this time or later."""
        return all(recording.times_s and recording.times_s[-1] >= time_s for recording in self._all)

    def wait_until_covered(self, time_s: float, wait: Callable[[float], None]) -> None:
        """`wait`: sleeps. RecordingError: a device can't be read, or its driver does not answer."""
        since_s = self.now_s()
        while not self.covers(time_s):
            self.check()
            if self.now_s() - since_s > DRIVER_TIMEOUT_S:
                raise RecordingError(f"the driver of a device has not answered for {DRIVER_TIMEOUT_S:g} s")
            wait(0.01)

    def _record(self, recording: Recording) -> None:
        due_s = time.monotonic()
        try:
            last = False
            while not last:
                last = self._ended.is_set()
                sample, time_s = recording.device.sample(), self.now_s()
                if (readings := recording.readings) is not None:
                    counter = readings.method is EnergyMethod.COUNTER
                    value = sample.energy_joules if counter else sample.power_watts
                    if value is None:
                        raise RecordingError(f"{recording.device.info.name} no longer reports its energy")  # noqa: TRY301
                    readings.add(time_s, value)
                recording.samples.append(sample)
                recording.times_s.append(time_s)  # the last: `covers` reads it in another thread
                due_s = max(due_s + 1 / SAMPLES_PER_S, time.monotonic())
                self._ended.wait(due_s - time.monotonic())
        except (RecordingError, DeviceGoneError) as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  such as an OSError of a file in /proc
            name = recording.device.info.name
            self._error = RecordingError(f"{name} can't be read: {type(error).__name__}: {error}")
            self._error.__cause__ = error


def _readings_of(device: Device) -> Readings | None:
    """The readings for the best method that the device has. RecordingError: it can't be read."""
    try:
        if device.energy_joules() is not None:
            return Readings(EnergyMethod.COUNTER)
        return Readings(EnergyMethod.SAMPLED_POWER) if device.power_watts() is not None else None
    except DeviceGoneError as error:
        raise RecordingError(f"{device.info.name} can't be read: {error}") from error
