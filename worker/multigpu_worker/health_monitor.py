"""Watches the device, decides with health.py whether it is fit, and carries out the consequences.

When the device becomes sick, the monitor sends a heartbeat at once and returns the leases that are in no engine. If no
task can run on the device, it returns all leases and ends the engines, so that the device can be reset. It checks a
sick device at growing intervals: the driver must answer and require no recovery action, an engine must start, and the
self-test must pass. Then the device is fit again.

The monitor also remembers the leases that ran when the driver reported an XID of class APPLICATION. If their engine
breaks later, they are suspected of having caused the XID.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import structlog

from multigpu_worker.device.events import DeviceEvent, EventKind, GroupEvents
from multigpu_worker.device.findings import findings
from multigpu_worker.device.health import Health, Reason, Severity
from multigpu_worker.device.interface import Device
from multigpu_worker.device.reset_watch import ResetNote, ResetWatch
from multigpu_worker.device.sampler import Sample, Sampler
from multigpu_worker.device.xids import REMEDIES, XidClass, xid_of
from multigpu_worker.processes.pool import EnginePool
from multigpu_worker.self_test import SelfTest

log = structlog.get_logger()

TICK_S = 0.1
# How long to wait for the driver's answer (a sample).
ANSWER_TIMEOUT_S = 5.0
# A driver call that takes longer makes the device sick.
HUNG_S = 10.0
# A check repeats a self-test whose engine was ended for another reason, up to this number of self-tests.
SELF_TESTS_MAX = 3
# An engine's death and the device event that explains it arrive within this time of each other, in any order.
GRACE_S = 0.25
# Codes and texts of the reasons for a check that the master asks for.
TASKS_FAIL = "tasks_fail", "different tasks broke their engine on it"
CHECK_REQUESTED = "check_requested", "an operator asked for a check"
# Uncorrectable memory errors are contained if an XID of class CONTAINED arrives this long before or after them.
CONTAINED_BEFORE_S, CONTAINED_AFTER_S = 1.0, 0.1


class DeviceUser(Protocol):
    """The methods of the dispatcher that the health monitor calls."""

    def give_back(self, why: str, *, running: bool) -> None:
        """Return the leases that are in no engine; with `running`, all. No attempt is charged."""

    def want_heartbeat(self) -> None: ...


class HealthMonitor:
    """Runs on the event loop."""

    def __init__(
        self,
        dispatcher: DeviceUser,
        device: Device,
        sampler: Sampler,
        pool: EnginePool,
        artifacts: str,
        *,
        self_test_interval_s: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._sampler = sampler
        self._pool = pool
        self._self_test_interval_s = self_test_interval_s
        self._loop = asyncio.get_running_loop()
        self._offset_s = time.time() - time.monotonic()
        self.health = Health(self._now())
        self.self_test = SelfTest(pool)
        self.checks_passed = 0
        self._checks_requested = 0
        self._check_at_once = False
        self._info = device.info
        self._is_gpu = device.info.device_id != "cpu"
        self._events = GroupEvents(device.info, self._received) if device.reports_events else None
        # The last sample and recovery actions that were checked for a reset.
        self._seen: tuple[Sample, tuple[int | None, ...]] | None = None
        self._note = ResetNote(Path(artifacts) / "device.resets" / f"{device.info.device_id}.json")
        self._reset = ResetWatch(self._note.read())
        # When the last XID of class CONTAINED arrived, on the monotonic clock.
        self._contained_at = -CONTAINED_BEFORE_S
        # Leases that ran at an XID of class APPLICATION and have not ended since.
        self._suspects: set[int] = set()
        self._self_test_s = time.monotonic()
        self._changed = asyncio.Event()
        # The last result of `_state` that `_apply_consequences` acted on.
        self._handled = self._state()

    @property
    def grace_s(self) -> float:
        """How long a report that blames a task for an engine's death waits for a device event that explains it."""
        return GRACE_S if self._events is not None else 0.0

    async def run(self) -> None:
        """Watch the device until cancelled."""
        if self._events is not None:
            self._events.start()
        if self._reset.needed is not None:  # stored by the previous process of this worker
            self._break_down(*self._reset.needed)
        try:
            while True:
                self._changed.clear()
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._changed.wait()
                    if self._is_gpu:
                        await self._sampler.sample(ANSWER_TIMEOUT_S)
                except TimeoutError:
                    pass
                self._update_health()
                self._suspects.intersection_update(self._pool.update_running())
                if self.health.check_due(self._now()):
                    await self._check()
                elif self.health.fit:
                    await self._test_when_idle()
        finally:
            if self._events is not None:
                self._events.stop()

    def checks_requested(self, checks: int, *, at_once: bool) -> None:
        """`checks`: how many checks the master has requested so far. `at_once`: an operator requested the last one."""
        if checks > self._checks_requested:
            self._checks_requested, self._check_at_once = checks, at_once
            if checks > self.checks_passed:
                self._require_check()
                self._apply_consequences()

    def _require_check(self) -> None:
        code, message = CHECK_REQUESTED if self._check_at_once else TASKS_FAIL
        self.health.happen(code, message, Severity.SICK, self._now(), at_once=self._check_at_once)

    def suspects(self, lease_id: int) -> bool:
        """Whether a lease was running when an XID of class APPLICATION was reported."""
        return lease_id in self._suspects

    def memory_failed(self, message: str) -> None:
        """A task failed with an error that means that the device's memory or one of its links has failed."""
        self._break_down("ecc_uncorrected", f"a task's error: {message}; reset the GPU")

    # --- observations ------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() + self._offset_s

    def _received(self, event: DeviceEvent) -> None:
        """Runs on the thread of DeviceEvents."""
        try:
            self._loop.call_soon_threadsafe(self._event, event)
        except RuntimeError:  # the loop is closed
            return

    def _event(self, event: DeviceEvent) -> None:
        of = f"{event.device}: " if event.device else ""
        if event.kind is EventKind.XID:
            self._xid(event.code, of)
        elif event.kind is EventKind.DOUBLE_BIT_ECC:
            self._errors_seen(f"{of}an uncorrectable double-bit memory error: reset the GPU")
        self._changed.set()

    def _xid(self, code: int, of: str) -> None:
        """`of`: begins the message, with the device if the worker has several; else empty."""
        xid = xid_of(code)
        log.warning("XID", xid=code, meaning=xid.meaning, what=xid.reaction.value)
        message = f"{of}XID {code}: {xid.meaning}"
        if xid.reaction in REMEDIES:
            message += f"; {REMEDIES[xid.reaction]}"
        match xid.reaction:
            case XidClass.APPLICATION:
                if not self._shared():
                    self._suspects.update(self._pool.update_running())
            case XidClass.SEQUEL:
                pass
            case XidClass.NOTICE:
                self._happen(f"xid_{code}", message, Severity.DEGRADED)
            case XidClass.CONTAINED:
                self._contained_at = time.monotonic()
                self._happen(f"xid_{code}", message, Severity.DEGRADED)
                self._dispatcher.give_back(message, running=True)
                self._pool.end_all_uncharged()
            case XidClass.RESET | XidClass.REBOOT | XidClass.PERSON:
                self._break_down(f"xid_{code}", message)

    def _shared(self) -> bool:
        """Whether other processes than this worker's engines use the device: they may have caused an XID."""
        sample, mps = self._sampler.latest, self._pool.mps is not None
        processes = () if sample is None else sample.telemetry.processes
        return any(not self._pool.owns(process.pid) for process in processes if process.mps_client or not mps)

    def _errors_seen(self, message: str) -> None:
        """Handle uncorrectable memory errors. Contained ones, which come with an XID, leave the device usable."""

        def decide() -> None:
            if time.monotonic() - self._contained_at > CONTAINED_BEFORE_S:
                self._break_down("ecc_uncorrected", message)

        self._loop.call_later(CONTAINED_AFTER_S, decide)

    def _break_down(self, code: str, message: str) -> None:
        """Add a fault that only a reset of the device repairs, and store it for the worker's next process."""
        if self._events is not None:
            self._reset.need(code, message)
            self._note.keep(self._reset.state)
        self._happen(code, message, Severity.UNUSABLE)

    def _happen(self, code: str, message: str, severity: Severity) -> None:
        self.health.happen(code, message, severity, self._now())
        self._apply_consequences()

    def _update_health(self) -> None:
        """Update the health from the latest sample and the state of the engines."""
        found: list[Reason] = []
        if self._sampler.hung_s() > HUNG_S:
            message = f"the driver has not answered for more than {HUNG_S:g} s: see the kernel's log, restart the host"
            found.append(Reason("driver_hung", message, Severity.SICK))
        if error := self._pool.default.start_error():
            found.append(Reason("engine_fails", f"no engine can start: {error}", Severity.NO_ENGINE))
        elif doing := self._pool.default.slow_start:
            found.append(Reason("engine_starts", f"the engine is not ready yet: {doing}", Severity.DEGRADED))
        sample = self._sampler.latest
        if sample is not None:
            actions = () if self._events is None else self._events.recovery_actions
            found += findings(self._info, sample, actions)
            if (sample, actions) != self._seen:
                self._seen = sample, actions
                self._look_for_reset(sample, actions)
        self._note.keep(self._reset.state)
        self.health.find(found, self._now())
        self.health.pass_time(self._now())
        self._apply_consequences()

    def _look_for_reset(self, sample: Sample, actions: Sequence[int | None]) -> None:
        if self._events is not None and not sample.gone:
            self._events.device_answers()
        unknown = None in actions or not actions
        wanted = True if sample.gone or any(actions) else None if unknown else False
        if sample.gone_code == "driver_not_loaded":  # a reload of the driver resets no GPU
            wanted = None
        needed = self._reset.needed
        errors = self._reset.look(driver_blocked=wanted, ecc_uncorrected=sample.telemetry.ecc_uncorrected)
        if needed is not None and self._reset.needed is None:
            self.health.reset_seen(self._now())
        if errors:  # tasks may have computed with corrupted data
            remedy = "" if self._events is None else ": reset the GPU"  # without events, the driver resets the device
            self._errors_seen(f"{errors} new uncorrectable memory errors{remedy}")

    # --- consequences ------------------------------------------------------------------------------------------------

    def _state(self) -> tuple[bool, bool, bool, dict[str, str]]:
        health = self.health
        return health.fit, health.unusable, health.barred, {r.code: r.message for r in health.reasons}

    def _apply_consequences(self) -> None:
        """If the health has changed, log it, report it to the master, and return leases or end engines."""
        before, self._handled = self._handled, self._state()
        if self._handled == before:
            return
        fit, unusable, barred, _ = before
        health = self.health
        why = "; ".join(reason.message for reason in health.reasons)
        log_it = log.info if health.fit else log.warning
        log_it("the device's health", state=health.state.name, reasons=[r.code for r in health.reasons], why=why)
        self._dispatcher.want_heartbeat()
        if health.barred and not barred:
            self._dispatcher.give_back(f"the device can't be used: {why}", running=True)
            self._release_device()
        elif (not health.fit and fit) or (health.unusable and not unusable):
            self._dispatcher.give_back(f"the device is sick: {why}", running=False)

    async def _check(self) -> None:
        """Check a sick device, and pass the result to the health."""
        health = self.health
        asked = self._checks_requested
        health.begin_check(self._now())
        self._apply_consequences()
        wrong = await self._examine()
        if not health.checking:  # a finding or a fault has voided the check
            pass
        elif wrong is None:
            health.pass_check(self._now())
            self.checks_passed = asked
            self._self_test_s = time.monotonic()
        else:
            health.fail_check(wrong.code, wrong.message, wrong.severity, self._now())
        if health.fit and self._checks_requested > asked:  # the master asked again meanwhile
            self._require_check()
        if health.barred:  # end the engine that was started for the check
            self._release_device()
        self._apply_consequences()

    def _release_device(self) -> None:
        """Close the device in all processes of this worker, so that it can be reset."""
        self._pool.release_device()
        self._sampler.device_released = True
        if self._events is not None:
            self._events.set_device_released(True)

    async def _examine(self) -> Reason | None:
        """Run the steps of a check. Returns the fault found; None: there is none, or the check was voided meanwhile."""
        if self._reset.needed is not None:
            code, message = self._reset.needed
            after = f"no reset was seen since: after the reset delete {self._note.path} and restart this worker"
            return Reason(code, f"{message}; {after}", Severity.UNUSABLE)
        self._sampler.device_released = False
        if self._events is not None:
            self._events.set_device_released(False)
        if self._is_gpu:
            before = self._sampler.latest
            if await self._sampler.sample(ANSWER_TIMEOUT_S) is before:
                message = f"the driver did not answer within {ANSWER_TIMEOUT_S:g} s"
                return Reason("driver_hung", message, Severity.SICK)
            self._update_health()
        if not self.health.checking:
            return None
        self._pool.use_device()
        for _ in range(SELF_TESTS_MAX):
            while not self._pool.ready:
                await asyncio.sleep(TICK_S / 2)
                self._update_health()
                if not self.health.checking:
                    return None
            result = await self.self_test.run(self._update_health)
            if not result.interrupted:
                break
        return result.failure

    async def _test_when_idle(self) -> None:
        interval_s = self._self_test_interval_s
        if not interval_s or time.monotonic() - self._self_test_s < interval_s or not self._pool.idle:
            return
        self._self_test_s = time.monotonic()
        failure = (await self.self_test.run(self._update_health)).failure
        if failure is not None:
            self._happen(failure.code, failure.message, failure.severity)
