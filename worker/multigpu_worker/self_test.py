"""Runs the self-test in an engine process and says what its result means for the device.

The self-test is a task with a known answer (engines/common/self_test.py). If the engine can't run it, or is ended for
another reason meanwhile, the result says nothing about the device.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from multigpu_worker.device.health import Reason, Severity
from multigpu_worker.processes.pool import EnginePool

log = structlog.get_logger()

POLL_S = 0.1
# Includes importing torch.
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    # The answer was right.
    passed: bool = False
    # Why the device is sick; None: it is not, or the test could not run.
    failure: Reason | None = None
    # The engine ended before the device had to work on the test, or for another reason.
    interrupted: bool = False


class SelfTest:
    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._id = 0
        self._result: asyncio.Future[SelfTestResult] | None = None
        # The device works on the test: torch is imported, and there is enough memory.
        self._begun = False

    async def run(self, poll: Callable[[], None]) -> SelfTestResult:
        """Run the self-test once. Calls `poll` about every POLL_S meanwhile."""
        self._id += 1
        self._begun = False
        result: asyncio.Future[SelfTestResult] = asyncio.get_running_loop().create_future()
        self._result = result
        self._pool.run_self_test(self._id)
        end_s = time.monotonic() + TIMEOUT_S
        try:
            while not result.done():
                await asyncio.wait([result], timeout=POLL_S)
                poll()
                if time.monotonic() > end_s:
                    message = f"the self-test, a small task, was not done after {TIMEOUT_S:g} s"
                    return SelfTestResult(failure=Reason("no_progress", message, Severity.UNUSABLE))
        finally:
            self._result = None
        return result.result()

    def begun(self, test_id: int) -> None:
        """The engine has everything that the test needs: if it fails from now on, the device is the cause."""
        if test_id == self._id:
            self._begun = True

    def done(self, test_id: int, passed: bool | None, detail: str) -> None:
        """The engine has a result. `passed` is None if the test could not run."""
        if test_id != self._id:
            return
        if passed is None:
            log.info("no self-test", why=detail)
        self._settle(SelfTestResult(passed=bool(passed), failure=_failure(detail) if passed is False else None))

    def engine_died(self, cause: str) -> None:
        """The engine that was last asked to run the self-test has ended. `cause`: what else may have ended it; empty:
        nothing.
        """
        if self._result is None or self._result.done():
            return
        if self._begun and not cause:
            self._settle(SelfTestResult(failure=_failure("the engine ended while it ran")))
            return
        why = f"the engine was ended: {cause}" if cause else "the engine ended before the device had to work on it"
        log.info("no self-test", why=why)
        self._settle(SelfTestResult(interrupted=True))

    def _settle(self, result: SelfTestResult) -> None:
        if self._result is not None and not self._result.done():
            self._result.set_result(result)


def _failure(detail: str) -> Reason:
    code = "cuda_sticky_error" if detail.startswith("it raised") else "canary_wrong"
    return Reason(
        code, f"the self-test, a task with a known answer: {detail}; have the GPU looked at", Severity.UNUSABLE
    )
