"""Whether a device is fit for work.

Pure: no clock, no driver, no process. What was observed goes in, with the time; a state, its reasons and when to check
come out. health_monitor.py feeds it and carries out what follows.

Two kinds of reasons. *Findings* are levels: they hold as long as they are found (heat, a lost device, a reset that is
required). *Faults* are events: a moment's observation (an XID, a wrong answer) that holds until a check is passed. A
finding so grave that the device was sick leaves a fault behind when it ends, so that no sick device comes back without
a check. Checks are tried with a delay that doubles while they fail, or while the device falls sick again soon after;
what is still found (a lost device, a reset that is required) is waited for, and then the check is due at once.

    HEALTHY ◄──► DEGRADED        nothing wrong; something wrong, but it works
        │            │
        └────┬───────┘
             ▼  a finding or a fault of gravity SICK or more
           SICK ◄─────┐
             │        │ the check failed, or another fault
             ▼        │
         RECOVERING ──┘          nothing grave is found any more, and it is being checked
             │
             ▼  the check was passed
    HEALTHY, DEGRADED
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

# The first check comes so long after the device fell sick; the delay doubles up to the limit.
CHECK_MIN_S, CHECK_MAX_S = 1.0, 300.0
# A device that was fit for so long starts with the shortest delay again.
STEADY_S = 600.0
# How long an event that only degrades a device is told.
NOTICE_S = 3600.0


class State(IntEnum):
    """The numbers are those of multigpu.v1.HealthState."""

    HEALTHY = 1
    DEGRADED = 2
    SICK = 3
    RECOVERING = 4


class Gravity(IntEnum):
    # It works on.
    DEGRADED = 1
    # Nothing new; what runs may finish.
    SICK = 2
    # No new engine can start; what runs may finish, and starts go on being tried.
    NO_ENGINE = 3
    # Nothing can run, or nothing that runs can be trusted: the device is let go of.
    UNUSABLE = 4


@dataclass(frozen=True, slots=True)
class Reason:
    # For programs: see multigpu.v1.HealthReason.
    code: str
    # For people: what is wrong and what to do.
    message: str
    gravity: Gravity
    since_s: float = 0.0


class Health:
    """See the module. Times in seconds, of any one clock that doesn't jump."""

    def __init__(self, now_s: float) -> None:
        self.state = State.HEALTHY
        self.since_s = now_s
        # When a check is due, if the device is sick and nothing grave is found.
        self.next_check_s = 0.0
        self._first_check_s = 0.0  # that which followed its falling sick
        self._fit_s = now_s - STEADY_S  # when it became fit
        self._findings: dict[str, Reason] = {}
        self._faults: dict[str, Reason] = {}
        self._checking = False
        # Checks failed, and times it fell sick, since it was steady.
        self._setbacks = 0

    @property
    def reasons(self) -> list[Reason]:
        """The gravest first, then the oldest."""
        every = {**self._faults, **self._findings}
        return sorted(every.values(), key=lambda reason: (-reason.gravity, reason.since_s, reason.code))

    @property
    def fit(self) -> bool:
        return self.state <= State.DEGRADED

    @property
    def unusable(self) -> bool:
        """Nothing can begin on it. Not while it is being checked: that is what it is tried for."""
        return not self._checking and any(reason.gravity >= Gravity.NO_ENGINE for reason in self.reasons)

    @property
    def barred(self) -> bool:
        """Nothing may be on it: no engine process either."""
        return not self._checking and any(reason.gravity is Gravity.UNUSABLE for reason in self.reasons)

    def find(self, findings: Iterable[Reason], now_s: float) -> None:
        """Take what is found now, all of it."""
        before, self._findings = self._findings, {}
        for finding in findings:
            old = before.get(finding.code)
            since_s = now_s if old is None else old.since_s
            self._findings[finding.code] = Reason(finding.code, finding.message, finding.gravity, since_s)
        for code, reason in before.items():
            if reason.gravity >= Gravity.SICK and code not in self._findings:
                self._faults[code] = reason
        if self._checking and self._blocked():
            self._set_back(now_s)
        self._derive(now_s)

    def happen(self, code: str, message: str, gravity: Gravity, now_s: float) -> None:
        """Something happened to the device."""
        old = self._faults.get(code)
        if old is not None:
            gravity = max(gravity, old.gravity)
        self._faults[code] = Reason(code, message, gravity, now_s if old is None else old.since_s)
        if self._checking and gravity >= Gravity.SICK:
            self._set_back(now_s)
        self._derive(now_s)

    def check_due(self, now_s: float) -> bool:
        """Whether to check the device now."""
        return self.state is State.SICK and not self._blocked() and now_s >= self.next_check_s

    def reset_seen(self, now_s: float) -> None:
        """The device is another one than that of the checks that failed: the next one does not wait for them."""
        if not self._checking:
            self.next_check_s = min(self.next_check_s, max(now_s, self._first_check_s))

    def begin_check(self, now_s: float) -> None:
        assert self.state is State.SICK
        self._checking = True
        self._derive(now_s)

    @property
    def checking(self) -> bool:
        """False after begin_check: something came between, and the check counts for nothing."""
        return self._checking

    def pass_check(self, now_s: float) -> None:
        """The device has shown that it is well."""
        assert self._checking
        self._checking = False
        self._faults = {code: reason for code, reason in self._faults.items() if reason.gravity < Gravity.SICK}
        self._derive(now_s)

    def fail_check(self, code: str, message: str, gravity: Gravity, now_s: float) -> None:
        """The device has shown that it is not."""
        assert self._checking
        self.happen(code, message, gravity, now_s)

    def pass_time(self, now_s: float) -> None:
        """Forget what was only worth a notice, long ago."""
        faults = self._faults
        old = [c for c, r in faults.items() if r.gravity < Gravity.SICK and now_s - r.since_s >= NOTICE_S]
        for code in old:
            del faults[code]
        if old:
            self._derive(now_s)

    def _blocked(self) -> bool:
        return any(reason.gravity >= Gravity.SICK for reason in self._findings.values())

    def _set_back(self, now_s: float) -> None:
        self._checking = False
        self.next_check_s = now_s + min(CHECK_MAX_S, CHECK_MIN_S * 2.0**self._setbacks)
        self._setbacks += 1

    def _derive(self, now_s: float) -> None:
        gravest = max((reason.gravity for reason in self.reasons), default=None)
        if gravest is not None and gravest >= Gravity.SICK:
            state = State.RECOVERING if self._checking else State.SICK
        else:
            state = State.HEALTHY if gravest is None else State.DEGRADED
        if state >= State.SICK and self.fit:
            if now_s - self._fit_s >= STEADY_S:
                self._setbacks = 0
            self._set_back(now_s)
            self._first_check_s = self.next_check_s
        elif state <= State.DEGRADED and not self.fit:
            self._fit_s = now_s
        if state is not self.state:
            self.state, self.since_s = state, now_s
