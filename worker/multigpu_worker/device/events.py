"""What the driver tells of a GPU by itself: XIDs, double-bit ECC errors, that it is unavailable, that it wants a reset.

A thread waits on NVML's event set, so that an event is known within milliseconds; between events it reads NVML's
recovery action. When the device is lost the set is of no use any more: the thread lets go of the driver, which may have
to be opened anew, until it is told that the device answers again. It is a daemon: a process may end although a call
hangs.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import structlog

from multigpu_worker.device.nvml import handles

try:
    import pynvml
except ImportError:  # a CPU worker does without
    pynvml = None

log = structlog.get_logger()

WAIT_MS = 500
RETRY_S = 0.5
RECOVERY_ACTION_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
WHOLE_GPU = 0xFFFFFFFF  # in the place of the ids of a MIG instance


class EventKind(Enum):
    XID = "xid"
    DOUBLE_BIT_ECC = "double_bit_ecc"
    # Whether it can be used, or what it needs, has changed: it is worth a look.
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    kind: EventKind
    # Of an XID.
    code: int = 0


class DeviceEvents:
    """`tell` is called on the thread."""

    def __init__(self, device_id: str, tell: Callable[[DeviceEvent], None]) -> None:
        self._device_id = device_id
        self._tell = tell
        self._stopped = threading.Event()
        self._answers = threading.Event()
        # With our context, so that its log lines have a worker_id.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="device-events", daemon=True)
        # NVML's nvmlDeviceGpuRecoveryAction_t, 0 too if the driver doesn't tell; None: not asked yet.
        self.recovery_action: int | None = None
        # Ids of a MIG instance: of its GPU instance, and of its compute instance.
        self._instance = (WHOLE_GPU, WHOLE_GPU)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, once the call that it is in has returned; doesn't wait for that."""
        self._stopped.set()
        self._answers.set()

    def device_answers(self) -> None:
        """The device is there, as far as its sensors know."""
        self._answers.set()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        complained = False
        while not self._stopped.is_set():
            try:
                self._listen()
            except pynvml.NVMLError as error:
                if self._stopped.is_set():
                    return
                if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                    self.recovery_action = 0
                    log.warning("this device tells of no events: only what its sensors show is known", error=str(error))
                    return
                if not complained:
                    log.warning("no events of the device for now", error=str(error))
                    complained = True
                self.recovery_action = 0
                self._tell(DeviceEvent(EventKind.CHANGED))
                self._stopped.wait(RETRY_S)
                self._answers.clear()
                self._answers.wait()
            except Exception:
                self.recovery_action = 0
                log.exception("the device's events can't be read")
                return
            else:
                complained = False

    def _listen(self) -> None:
        """Tell of events until the end. NVMLError: the device can't be listened to, now or at all."""
        own, handle = handles(self._device_id)
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
                try:
                    data = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
                except pynvml.NVMLError as error:
                    if error.value == pynvml.NVML_ERROR_TIMEOUT:
                        continue
                    raise
                self._tell_of(data)
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _tell_of(self, data: Any) -> None:
        instance = (data.gpuInstanceId, data.computeInstanceId)
        if WHOLE_GPU not in instance and instance != self._instance:
            return
        if data.eventType == pynvml.nvmlEventTypeXidCriticalError:
            self._tell(DeviceEvent(EventKind.XID, data.eventData))
        elif data.eventType == pynvml.nvmlEventTypeDoubleBitEccError:
            self._tell(DeviceEvent(EventKind.DOUBLE_BIT_ECC))
        else:
            self._tell(DeviceEvent(EventKind.CHANGED))

    def _read_recovery_action(self, handle: Any) -> None:
        value = pynvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_ACTION_FIELD])[0]
        action = value.value.uiVal if value.nvmlReturn == pynvml.NVML_SUCCESS else 0
        if action != self.recovery_action:
            self.recovery_action = action
            self._tell(DeviceEvent(EventKind.CHANGED))
