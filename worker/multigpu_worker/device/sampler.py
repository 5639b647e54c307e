"""The thread that makes all driver calls for samples and energy, so that a driver that hangs stops nothing else.

The agent requests a sample and waits a little. If there is no answer, it goes on with the last sample, whose time shows
its age. While the device works, the thread also reads the device's energy. It is a daemon thread, so the process can
end while a driver call hangs.
"""

import asyncio
import contextvars
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from multigpu_worker.device.energy import READING_INTERVAL_S, Energy, EnergyMeter, EnergyMethod
from multigpu_worker.device.interface import Device, DeviceGoneError, Telemetry

log = structlog.get_logger()

# While the device is released, the driver is opened for one sample at this interval.
RELEASED_INTERVAL_S = 2.0
# Until a reading of the device's energy succeeds, it is tried at this interval: the device may be gone at the start.
METER_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    telemetry: Telemetry
    # In nanoseconds since 1970.
    time_ns: int
    # Why the device cannot be used, and DeviceGoneError.code; empty: it can.
    gone: str = ""
    gone_code: str = ""


class Sampler:
    """Public methods are called on the event loop; those below "the thread" run on the thread."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.latest: Sample | None = None
        # None: the energy of tasks is not measured, or can't be read yet.
        self.meter: EnergyMeter | None = None
        # Concurrent batches; 0: the device has no work.
        self.running = 0
        # The driver is closed between samples, so that the device can be reset.
        self.device_released = False
        # When the driver was last closed because the device is released, on the monotonic clock.
        self._released_s = 0.0
        self._wake = threading.Event()
        self._stopped = False
        # An unexpected error of an energy reading was logged. Energy is read too often to log every error.
        self._energy_failed = False
        # When the current driver call began, on the monotonic clock; 0.0: there is none.
        self._asked_s = 0.0
        self._wanted: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._lock = threading.Lock()
        # In a copy of the caller's context, so that the thread's log lines have a worker_id.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="device-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current driver call. Does not wait for it."""
        self._stopped = True
        self._wake.set()

    async def sample(self, timeout_s: float) -> Sample | None:
        """A new sample, or the last one if the driver does not answer in time. None: there was none yet."""
        if self.hung_s() > timeout_s:  # a new sample would have to wait for the driver call in progress
            return self.latest
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._lock:
            self._wanted.append((loop, future))
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            with self._lock:
                self._wanted = [entry for entry in self._wanted if entry[1] is not future]
        return self.latest

    def hung_s(self) -> float:
        """How long the current driver call has taken; 0.0: there is none."""
        asked_s = self._asked_s
        return time.monotonic() - asked_s if asked_s else 0.0

    def begin_work(self) -> None:
        """Measure energy from now on."""
        if self.meter is not None and not self.running:
            self.running = 1
            self._wake.set()

    def end_work(self) -> None:
        """Stop measuring: the energy of an idle device belongs to no task."""
        self.running = 0
        if self.meter is not None:
            self.meter.reset()

    def count_sharers(self, owns: Callable[[int], bool]) -> None:
        """Set the meter's number of sharers by the last sample. `owns`: whether a process belongs to an engine."""
        if self.meter is None or self.latest is None:
            return
        processes = self.latest.telemetry.processes
        mps = any(process.mps_client for process in processes)
        listed = [(owns(process.pid), process.idle) for process in processes if process.mps_client == mps]
        others = sum(not own and not idle for own, idle in listed)
        # In a container the pids are the host's, and `owns` knows none: then one of the working processes is an engine.
        self.meter.sharers = max(1, others + any(own for own, _ in listed))

    def measure(self, start_ns: int, finish_ns: int, units: int) -> Energy | None:
        """As EnergyMeter.measure."""
        return None if self.meter is None else self.meter.measure(start_ns, finish_ns, units)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # No meter for a host, whose energy all its processes share, or for MIG: all instances share the GPU's energy.
        measures = self.device.info.device_id != "cpu" and not self.device.info.mig_enabled
        looked_s = -math.inf
        while not self._stopped:
            looks = measures and self.meter is None and not self.device_released
            if looks and time.monotonic() - looked_s >= METER_INTERVAL_S:
                self.meter = self._find_meter()
                looked_s = time.monotonic()
            self._wake.wait(READING_INTERVAL_S if self.meter is not None and self.running else None)
            self._wake.clear()
            self._read_energy()
            with self._lock:
                wanted, self._wanted = self._wanted, []
            if wanted and not self._stopped:
                self._sample()
                for loop, future in wanted:
                    _settle(loop, future)

    def _sample(self) -> None:
        if self.device_released and time.monotonic() - self._released_s < RELEASED_INTERVAL_S:
            return
        self._asked_s = time.monotonic()
        now_ns = time.time_ns()
        try:
            self.latest = Sample(telemetry=self.device.sample(), time_ns=now_ns)
        except DeviceGoneError as error:
            self.latest = Sample(telemetry=Telemetry(), time_ns=now_ns, gone=str(error), gone_code=error.code)
        except Exception:
            log.exception("the device's sensors can't be read")
        finally:
            if self.device_released:
                self.device.release()
                self._released_s = time.monotonic()
            self._asked_s = 0.0

    def _find_meter(self) -> EnergyMeter | None:
        for method in EnergyMethod:
            if self._reading(method) is not None:
                return EnergyMeter(method)
        return None

    def _reading(self, method: EnergyMethod) -> float | None:
        """The energy counter or the power, by the method; None: not reported."""
        self._asked_s = time.monotonic()
        try:
            if method is EnergyMethod.COUNTER:
                return self.device.energy_joules()
            return self.device.power_watts()
        except DeviceGoneError:
            return None
        except Exception:
            if not self._energy_failed:
                log.exception("the device's energy can't be read")
            self._energy_failed = True
            return None
        finally:
            self._asked_s = 0.0

    def _read_energy(self) -> None:
        meter, running = self.meter, self.running
        if meter is None:
            return
        value = self._reading(meter.method) if running else None
        if value is None:
            meter.reset()
        else:
            meter.read(time.time_ns(), value, running)
            if not self.running:  # `end_work` may have reset the meter before this reading
                meter.reset()


def _settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    def done() -> None:
        if not future.done():
            future.set_result(None)

    try:
        loop.call_soon_threadsafe(done)
    except RuntimeError:  # the loop is closed
        return
