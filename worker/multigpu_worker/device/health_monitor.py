"""Looks after the device: observes it, decides with health.py whether it is fit, and sees to what follows.

When the device falls sick, the master is told at once and the leases that only wait go back; if nothing can run on it,
all of them do, and the engine is ended, so that the device can be reset. While it is sick it is checked again and
again: does the driver answer, does it want nothing done, does an engine start, is the canary's answer right? Then it
is back. Who ran when an XID of the application's kind came is remembered here: they answer for what breaks then.
"""

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from multigpu_worker.device.events import DeviceEvent, DeviceEvents, EventKind
from multigpu_worker.device.health import Gravity, Health, Reason
from multigpu_worker.device.interface import Device
from multigpu_worker.device.reset_watch import ResetNote, ResetWatch
from multigpu_worker.device.sampler import Sample, Sampler
from multigpu_worker.device.xids import REMEDIES, XidClass, xid_of
from multigpu_worker.processes.pool import EnginePool

log = structlog.get_logger()

TICK_S = 0.1
# A sample must come within so long to count as an answer in a check.
ANSWER_TIMEOUT_S = 5.0
# A driver that owes an answer for so long is not well.
HUNG_S = 10.0
# The limit of the canary's answer: importing torch is part of it.
CANARY_TIMEOUT_S = 120.0
# A check tries again, so often in all, if the engine was ended for another reason while the canary sang.
CANARY_TRIES = 3
# What an engine's death has to do with an event of its device: they reach us in any order within so long.
GRACE_S = 0.25
# Uncorrectable errors are those of a contained one (XID 94) that is told within these times before and after them.
CONTAINED_BEFORE_S, CONTAINED_AFTER_S = 1.0, 0.1

# NVML's nvmlDeviceGpuRecoveryAction_t.
RECOVERY_ACTIONS = {
    1: ("reset_required", "the driver wants a reset of the GPU: run nvidia-smi --gpu-reset", Gravity.UNUSABLE),
    2: ("reboot_required", "the driver wants a restart of the host", Gravity.UNUSABLE),
    3: ("drain_p2p", "the driver wants peer-to-peer traffic to end, and then a reset of the GPU", Gravity.SICK),
    4: ("reset_required", "the driver wants the GPU drained and reset: run nvidia-smi --gpu-reset", Gravity.UNUSABLE),
    5: ("recover_imex", "the driver wants its IMEX domain recovered", Gravity.SICK),
    6: ("reset_required", "the driver wants the GPU's PCIe bus reset", Gravity.UNUSABLE),
    7: ("reboot_required", "the driver wants a restart of the system", Gravity.UNUSABLE),
}
THERMAL = {"hw_thermal_slowdown", "sw_thermal_slowdown"}
POWER = {"hw_power_brake_slowdown", "board_limit"}


class Ward(Protocol):
    """What the agent does for us."""

    def give_back(self, why: str, *, running: bool) -> None:
        """Return leases uncharged: those that wait, or all."""

    def want_heartbeat(self) -> None: ...


@dataclass(slots=True)
class Canary:
    """The one that sings now."""

    canary_id: int
    # Whether its answer was right, None: it could not be tried; and words on it.
    answer: asyncio.Future[tuple[bool | None, str]]
    # The device works on it: torch is there, and memory enough.
    begun: bool = False
    # It can't be told of it whether the device is well: its engine was ended.
    interrupted: bool = False


class Caretaker:
    """See the module. All on the event loop."""

    def __init__(
        self,
        ward: Ward,
        device: Device,
        sampler: Sampler,
        pool: EnginePool,
        artifacts: str,
        *,
        canary_interval_s: float,
    ) -> None:
        self._ward = ward
        self._sampler = sampler
        self._pool = pool
        self._canary_interval_s = canary_interval_s
        self._loop = asyncio.get_running_loop()
        self._offset_s = time.time() - time.monotonic()
        self.health = Health(self._now())
        self.checks_passed = 0
        self._checks_asked = 0
        self._events: DeviceEvents | None = None
        if device.info.device_id != "cpu":
            self._events = DeviceEvents(device.info.device_id, self._tell)
        self._seen: Sample | None = None
        self._note = ResetNote(Path(artifacts) / "device.resets" / f"{device.info.device_id}.json")
        self._reset = ResetWatch(self._note.read())
        # When an XID told last of a contained error, by the monotonic clock.
        self._contained_s = -CONTAINED_BEFORE_S
        # Leases that ran when an XID of the application's kind came, and were not settled since.
        self._suspects: set[int] = set()
        self._canary_ids = itertools.count(1)
        self._canary: Canary | None = None
        self._canary_s = time.monotonic()
        self._changed = asyncio.Event()

    @property
    def grace_s(self) -> float:
        """How long to wait with the blame for an engine's death: the device may have a word on it."""
        return GRACE_S if self._events is not None else 0.0

    @property
    def unusable(self) -> bool:
        """Nothing can begin on the device: leases that come go back."""
        return self.health.unusable

    @property
    def barred(self) -> bool:
        """Nothing may be on the device: what runs goes back, too."""
        return self.health.barred

    async def run(self) -> None:
        """Look after the device until cancelled."""
        if self._events is not None:
            self._events.start()
        if self._reset.needed is not None:  # since the last process of this worker
            self._break_down(*self._reset.needed)
        try:
            while True:
                self._changed.clear()
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._changed.wait()
                    if self._events is not None:
                        await self._sampler.sample(ANSWER_TIMEOUT_S)
                except TimeoutError:
                    pass
                self._look()
                self._suspects.intersection_update(self._pool.running())
                if self.health.check_due(self._now()):
                    await self._check()
                elif self.health.fit:
                    await self._sing_when_idle()
        finally:
            if self._events is not None:
                self._events.stop()

    def asked(self, checks: int) -> None:
        """The master has asked for so many checks of the device, in all."""
        if checks > self._checks_asked:
            self._checks_asked = checks
            if checks > self.checks_passed:
                self._happen("tasks_fail", "different tasks broke their engine on it", Gravity.SICK)

    # --- what is observed --------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() + self._offset_s

    def _tell(self, event: DeviceEvent) -> None:
        """On the thread of the events."""
        try:
            self._loop.call_soon_threadsafe(self._event, event)
        except RuntimeError:  # the loop has ended
            return

    def _event(self, event: DeviceEvent) -> None:
        if event.kind is EventKind.XID:
            self._xid(event.code)
        elif event.kind is EventKind.DOUBLE_BIT_ECC:
            self._errors_seen("a double-bit error of its memory, which can't be corrected: reset the GPU")
        self._changed.set()

    def _xid(self, code: int) -> None:
        xid = xid_of(code)
        log.warning("XID", xid=code, meaning=xid.meaning, what=xid.what.value)
        message = f"XID {code}: {xid.meaning}"
        if xid.what in REMEDIES:
            message += f"; {REMEDIES[xid.what]}"
        match xid.what:
            case XidClass.APPLICATION:
                if not self._shared():
                    self._suspects.update(self._pool.running())
            case XidClass.SEQUEL:
                pass
            case XidClass.NOTICE:
                self._happen(f"xid_{code}", message, Gravity.DEGRADED)
            case XidClass.CONTAINED:
                self._contained_s = time.monotonic()
                self._happen(f"xid_{code}", message, Gravity.DEGRADED)
                self._ward.give_back(message, running=True)
                self._pool.replace()
            case XidClass.RESET | XidClass.REBOOT | XidClass.PERSON:
                self._break_down(f"xid_{code}", message)

    def _shared(self) -> bool:
        """Whether other processes than our engines compute on the device: an XID may be theirs."""
        sample, mps = self._sampler.latest, self._pool.mps is not None
        processes = () if sample is None else sample.telemetry.processes
        return any(not self._pool.owns(process.pid) for process in processes if process.mps_client or not mps)

    def _errors_seen(self, message: str) -> None:
        """Uncorrectable errors of the memory. Contained ones cost the device nothing: their XID comes with them."""

        def decide() -> None:
            if time.monotonic() - self._contained_s > CONTAINED_BEFORE_S:
                self._break_down("ecc_uncorrected", message)

        self._loop.call_later(CONTAINED_AFTER_S, decide)

    def _break_down(self, code: str, message: str) -> None:
        """Something happened that only a reset mends."""
        if self._events is not None:
            self._reset.need(code, message)
            self._note.keep(self._reset.state)
        self._happen(code, message, Gravity.UNUSABLE)

    def _happen(self, code: str, message: str, gravity: Gravity) -> None:
        before = self._word()
        self.health.happen(code, message, gravity, self._now())
        self._follow(before)

    def _look(self) -> None:
        """Take what the sensors say."""
        before = self._word()
        sample, findings = self._sampler.latest, []
        hung_s = self._sampler.hung_s()
        if hung_s > HUNG_S:
            message = f"the driver has not answered for more than {HUNG_S:g} s: see the kernel's log, restart the host"
            findings.append(Reason("driver_hung", message, Gravity.SICK))
        if error := self._pool.default.host.start_error():
            findings.append(Reason("engine_fails", f"no engine can start: {error}", Gravity.NO_ENGINE))
        elif doing := self._pool.default.host.slow_start:
            findings.append(Reason("engine_starts", f"the engine is not ready yet: {doing}", Gravity.DEGRADED))
        if sample is not None:
            if self._events is not None and not sample.gone and sample is not self._seen:
                self._events.device_answers()
            findings += self._findings(sample)
            self._look_for_reset(sample)
        self._note.keep(self._reset.state)
        self.health.find(findings, self._now())
        self.health.pass_time(self._now())
        self._follow(before)

    def _findings(self, sample: Sample) -> Iterable[Reason]:
        if sample.gone:
            yield Reason(sample.gone_code, sample.gone, Gravity.UNUSABLE)
        action = self._events.recovery_action if self._events is not None else None
        if action:
            unknown = ("recovery_required", f"the driver wants recovery action {action}", Gravity.SICK)
            yield Reason(*RECOVERY_ACTIONS.get(action, unknown))
        throttle = set(sample.telemetry.throttle_reasons)
        if throttle & THERMAL:
            yield Reason("thermal_throttle", "it is too hot and runs slower: look after its cooling", Gravity.DEGRADED)
        if throttle & POWER:
            message = "it is short of power and runs slower: look after its supply"
            yield Reason("power_throttle", message, Gravity.DEGRADED)
        rows = sample.telemetry.remapped_rows
        if rows is not None and rows.failed:
            message = "a row of its memory could not be replaced, no spare one is left: have the GPU replaced"
            yield Reason("row_remap_failed", message, Gravity.DEGRADED)
        if rows is not None and rows.pending:
            message = "a row of its memory is to be replaced by a spare one: reset the GPU when it is convenient"
            yield Reason("row_remap_pending", message, Gravity.DEGRADED)

    def _look_for_reset(self, sample: Sample) -> None:
        if sample is self._seen:
            return
        self._seen = sample
        action = 0 if self._events is None else self._events.recovery_action
        wanted = True if sample.gone or action else None if action is None else False
        needed = self._reset.needed
        errors = self._reset.look(wanted=wanted, ecc_uncorrected=sample.telemetry.ecc_uncorrected)
        if needed is not None and self._reset.needed is None:
            self.health.reset_seen(self._now())
        if errors:  # somebody computed with wrong numbers
            self._errors_seen(f"{errors} new errors of its memory, which can't be corrected: reset the GPU")

    # --- what follows ------------------------------------------------------------------------------------------------

    def _word(self) -> tuple[bool, bool, bool, dict[str, str]]:
        health = self.health
        return health.fit, health.unusable, health.barred, {r.code: r.message for r in health.reasons}

    def _follow(self, before: tuple[bool, bool, bool, dict[str, str]]) -> None:
        """Do what a change of health asks for."""
        fit, unusable, barred, _ = before
        health = self.health
        after = self._word()
        if after == before:
            return
        why = "; ".join(after[3].values())
        log_it = log.info if health.fit else log.warning
        log_it("the device's health", state=health.state.name, reasons=list(after[3]), why=why)
        self._ward.want_heartbeat()
        if health.barred and not barred:
            self._ward.give_back(f"the device can't be used: {why}", running=True)
            self._pool.park()
        elif (not health.fit and fit) or (health.unusable and not unusable):
            self._ward.give_back(f"the device is sick: {why}", running=False)

    async def _check(self) -> None:
        """See whether a sick device is well again."""
        before = self._word()
        health = self.health
        asked = self._checks_asked
        health.begin_check(self._now())
        self._follow(before)
        wrong = await self._examine()
        before = self._word()
        if not health.checking:  # something came between
            pass
        elif wrong is None:
            health.pass_check(self._now())
            self._reset.done()
            self.checks_passed = asked
            self._canary_s = time.monotonic()
        else:
            health.fail_check(*wrong, self._now())
        if health.fit and self._checks_asked > asked:  # meanwhile it was asked again
            health.happen("tasks_fail", "different tasks broke their engine on it", Gravity.SICK, self._now())
        if health.barred:  # what was tried for the check goes again
            self._pool.park()
        self._follow(before)

    async def _examine(self) -> tuple[str, str, Gravity] | None:
        """What is wrong with the device; None: nothing that we can find."""
        if self._events is not None:
            asked_ns = time.time_ns()
            sample = await self._sampler.sample(ANSWER_TIMEOUT_S)
            if sample is None or sample.time_ns < asked_ns:
                return "driver_hung", f"the driver did not answer within {ANSWER_TIMEOUT_S:g} s", Gravity.SICK
            self._look()
        if not self.health.checking:
            return None
        self._pool.unpark()
        for _ in range(CANARY_TRIES):
            while not self._pool.ready:
                await asyncio.sleep(TICK_S / 2)
                self._look()
                if not self.health.checking:
                    return None
            wrong, interrupted = await self._sing()
            if not interrupted:
                break
        if wrong is None and self._reset.needed is not None:
            code, message = self._reset.needed
            unseen = "no reset was seen since, and the self-test, which needs torch, did not run"
            after = f"after the reset delete {self._note.path} and restart this worker"
            return code, f"{message}; {unseen}: {after}", Gravity.UNUSABLE
        return wrong

    # --- the canary --------------------------------------------------------------------------------------------------

    async def _sing_when_idle(self) -> None:
        if not self._canary_interval_s or time.monotonic() - self._canary_s < self._canary_interval_s:
            return
        if not self._pool.idle:
            return
        self._canary_s = time.monotonic()
        wrong, _ = await self._sing()
        if wrong is not None:
            self._happen(*wrong)

    async def _sing(self) -> tuple[tuple[str, str, Gravity] | None, bool]:
        """Have the engine work on a task whose answer is known.

        What is wrong, None: nothing, or it can't be tried; and whether it was interrupted.
        """
        canary = self._canary = Canary(next(self._canary_ids), self._loop.create_future())
        self._pool.sing(canary.canary_id)
        end_s = time.monotonic() + CANARY_TIMEOUT_S
        try:
            while not canary.answer.done():
                await asyncio.wait([canary.answer], timeout=TICK_S)
                self._look()
                if time.monotonic() > end_s:
                    message = f"the canary, a small task, was not done after {CANARY_TIMEOUT_S:g} s"
                    return ("no_progress", message, Gravity.UNUSABLE), False
        finally:
            self._canary = None
        right, words = canary.answer.result()
        if right is None:
            log.info("no canary", why=words)
        if right:
            self._reset.done()
        if right is not False:
            return None, canary.interrupted
        code = "cuda_sticky_error" if words.startswith("it raised") else "canary_wrong"
        message = f"the canary, a task whose answer is known: {words}; have the GPU looked at"
        return (code, message, Gravity.UNUSABLE), False

    def canary_begun(self, canary_id: int) -> None:
        if self._canary is not None and self._canary.canary_id == canary_id:
            self._canary.begun = True

    def canary_answered(self, canary_id: int, right: bool | None, words: str) -> None:
        if self._canary is not None and self._canary.canary_id == canary_id and not self._canary.answer.done():
            self._canary.answer.set_result((right, words))

    def engine_died(self, others: str) -> None:
        """The engine has ended, the canary with it. `others`: what else may have ended it; empty: nothing.

        The device answers for it only if it was at work on the canary, and nothing else can have ended the engine.
        """
        canary = self._canary
        if canary is None or canary.answer.done():
            return
        if canary.begun and not others:
            canary.answer.set_result((False, "the engine ended while it ran"))
            return
        canary.interrupted = True
        why = f"the engine was ended: {others}" if others else "the engine ended before the device had to work on it"
        canary.answer.set_result((None, why))

    # --- whom to blame -----------------------------------------------------------------------------------------------

    def suspects(self, lease_id: int) -> bool:
        """Whether a lease ran when an XID of the application's kind came."""
        return lease_id in self._suspects

    def memory_failed(self, message: str) -> None:
        """A task's error says that the device's memory, or a link of its, has failed."""
        self._break_down("ecc_uncorrected", f"a task's error: {message}; reset the GPU")
