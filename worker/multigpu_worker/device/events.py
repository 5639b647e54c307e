"""Events that the driver reports about a GPU: XIDs, double-bit ECC errors, unavailability, required recovery actions.

A thread waits on NVML's event set, so that an event is known within milliseconds, and reads NVML's recovery action in
between. When the device is lost, its event set becomes useless: the thread closes the driver and waits until the device
answers. While the device is released, so that it can be reset, the thread opens the driver only for one reading at an
interval. It is a daemon thread, so the process can end while a driver call hangs.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import structlog

from multigpu_worker.device.interface import DeviceInfo
from multigpu_worker.device.nvml import handles
from multigpu_worker.device.sampler import RELEASED_INTERVAL_S

try:
    import pynvml
except ImportError:  # a CPU worker needs none
    pynvml = None

log = structlog.get_logger()

WAIT_MS = 500
RETRY_S = 0.5
RECOVERY_ACTION_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
WHOLE_GPU = 0xFFFFFFFF  # replaces the ids of a MIG instance


class EventKind(Enum):
    XID = "xid"
    DOUBLE_BIT_ECC = "double_bit_ecc"
    # The device's availability or its required recovery action has changed.
    AVAILABILITY_CHANGED = "availability_changed"


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    kind: EventKind
    # The number of the XID.
    code: int = 0
    # The name of the device, if the worker has a group; else empty.
    device: str = ""


class DeviceEvents:
    """The events of one device. `report` is called on the thread."""

    def __init__(self, device: DeviceInfo, report: Callable[[DeviceEvent], None]) -> None:
        self._device = device
        self._report = report
        self._stopped = threading.Event()
        self._answers = threading.Event()
        self._device_released = False
        # In a copy of the caller's context, so that the thread's log lines have a worker_id.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="device-events", daemon=True)
        # NVML's nvmlDeviceGpuRecoveryAction_t; 0 also if the driver does not report it. None: not read yet.
        self.recovery_action: int | None = None
        # The ids of a MIG instance: GPU instance, compute instance.
        self._instance = (WHOLE_GPU, WHOLE_GPU)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current driver call. Does not wait for it."""
        self._stopped.set()
        self._answers.set()

    def device_answers(self) -> None:
        """The device can be sampled: listen again, if the thread waits for that."""
        self._answers.set()

    def set_device_released(self, released: bool) -> None:
        self._device_released = released
        self._answers.set()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        logged = False
        while not self._stopped.is_set():
            try:
                self._answers.clear()
                self._listen()
                self._answers.wait(RELEASED_INTERVAL_S)
            except pynvml.NVMLError as error:
                if self._stopped.is_set():
                    return
                self.recovery_action = 0
                if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                    log.warning("the device reports no events: only its sensors show faults", error=str(error))
                    return
                if not logged:
                    log.warning("no events of the device for now", error=str(error))
                    logged = True
                self._report(DeviceEvent(EventKind.AVAILABILITY_CHANGED))
                self._stopped.wait(RETRY_S)
                self._answers.clear()
                self._answers.wait()
            except Exception:
                self.recovery_action = 0
                log.exception("the device's events can't be read")
                return

    def _listen(self) -> None:
        """Report events until stopped or the device is released. Raises NVMLError."""
        pynvml.nvmlInit()
        try:
            self._listen_opened()
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _listen_opened(self) -> None:
        own, handle = handles(self._device)
        if own is not handle:
            self._instance = pynvml.nvmlDeviceGetGpuInstanceId(own), pynvml.nvmlDeviceGetComputeInstanceId(own)
        wanted = (
            pynvml.nvmlEventTypeXidCriticalError
            | pynvml.nvmlEventTypeDoubleBitEccError
            | pynvml.nvmlEventTypeGpuUnavailableError
            | pynvml.nvmlEventTypeGpuRecoveryAction
        )
        wanted &= pynvml.nvmlDeviceGetSupportedEventTypes(handle)
        if not wanted:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        events = pynvml.nvmlEventSetCreate()
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, wanted, events)
            while not self._stopped.is_set():
                self._read_recovery_action(handle)
                if self._device_released:
                    return
                try:
                    data = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
                except pynvml.NVMLError as error:
                    if error.value == pynvml.NVML_ERROR_TIMEOUT:
                        continue
                    raise
                self._handle_event(data)
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _handle_event(self, data: Any) -> None:
        instance = (data.gpuInstanceId, data.computeInstanceId)
        if WHOLE_GPU not in instance and instance != self._instance:
            return
        if data.eventType == pynvml.nvmlEventTypeXidCriticalError:
            self._report(DeviceEvent(EventKind.XID, data.eventData))
        elif data.eventType == pynvml.nvmlEventTypeDoubleBitEccError:
            self._report(DeviceEvent(EventKind.DOUBLE_BIT_ECC))
        else:
            self._report(DeviceEvent(EventKind.AVAILABILITY_CHANGED))

    def _read_recovery_action(self, handle: Any) -> None:
        value = pynvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_ACTION_FIELD])[0]
        action = value.value.uiVal if value.nvmlReturn == pynvml.NVML_SUCCESS else 0
        if action != self.recovery_action:
            self.recovery_action = action
            self._report(DeviceEvent(EventKind.AVAILABILITY_CHANGED))


class GroupEvents:
    """The events of all devices of a worker. `report` is called on their threads."""

    def __init__(self, device: DeviceInfo, report: Callable[[DeviceEvent], None]) -> None:
        self._events = [
            DeviceEvents(member, lambda event, name=member.name: report(replace(event, device=name)))  # type: ignore[misc]
            for member in device.members
        ] or [DeviceEvents(device, report)]

    @property
    def recovery_actions(self) -> tuple[int | None, ...]:
        """DeviceEvents.recovery_action of each device."""
        return tuple(each.recovery_action for each in self._events)

    def start(self) -> None:
        for each in self._events:
            each.start()

    def stop(self) -> None:
        for each in self._events:
            each.stop()

    def device_answers(self) -> None:
        for each in self._events:
            each.device_answers()

    def set_device_released(self, released: bool) -> None:
        for each in self._events:
            each.set_device_released(released)
