"""The state machine of a device's health.

Pure: health_monitor.py passes in observations with their time, and carries out the consequences of the state.

There are two kinds of reasons. *Findings* are conditions: they hold while they are observed (heat, a lost device, a
required reset). *Faults* are events (an XID, a wrong answer): they hold until a check is passed; those of severity
DEGRADED hold for NOTICE_S, with or without a check. A finding of severity SICK or more becomes a fault when it ends, so
that a sick device returns only after a check. The delay before a check doubles with each failed check, and each time
the device falls sick again within STEADY_S. A finding of severity SICK or more blocks the check, but the delay passes
meanwhile: if the delay is over when the finding ends, the check is due at once.

    HEALTHY ◄──► DEGRADED        no reason holds; only reasons of severity DEGRADED hold
        │            │
        └────┬───────┘
             ▼  a finding or a fault of severity SICK or more
           SICK ◄─────┐
             │        │ the check failed, or another fault
             ▼        │
         RECOVERING ──┘          being checked; no finding of severity SICK or more holds
             │
             ▼  the check passed
    HEALTHY, DEGRADED
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

# Delay before the first check after the device fell sick, and the longest delay.
CHECK_MIN_S, CHECK_MAX_S = 1.0, 300.0
# Enough for the longest delay: 2.0 to the power of 1,024 is an OverflowError.
DOUBLINGS_MAX = 32
# After the device was fit for this long, the delay starts at CHECK_MIN_S again.
STEADY_S = 600.0
# How long a fault of severity DEGRADED holds.
NOTICE_S = 3600.0


class State(IntEnum):
    """Values as in multigpu.v1.HealthState."""

    HEALTHY = 1
    DEGRADED = 2
    SICK = 3
    RECOVERING = 4


class Severity(IntEnum):
    # The device stays in use.
    DEGRADED = 1
    # No new tasks; running ones may finish.
    SICK = 2
    # No engine can start. Running tasks may finish, and starts are retried.
    NO_ENGINE = 3
    # No task can run, or no result can be trusted: engines are ended.
    UNUSABLE = 4


@dataclass(frozen=True, slots=True)
class Reason:
    # See multigpu.v1.HealthReason.
    code: str
    # What is wrong, and what to do.
    message: str
    severity: Severity
    since_s: float = 0.0


class Health:
    """Times in seconds of a clock that does not jump."""

    def __init__(self, now_s: float) -> None:
        self.state = State.HEALTHY
        self.since_s = now_s
        # When a check is due, unless a finding blocks it.
        self.next_check_s = 0.0
        self._first_check_s = 0.0  # when the first check after the device fell sick was due
        self._fit_s = now_s - STEADY_S  # when the device became fit
        self._findings: dict[str, Reason] = {}
        self._faults: dict[str, Reason] = {}
        self._checking = False
        # The number of failed checks, and of times that the device fell sick, since it was last fit for STEADY_S.
        self._setbacks = 0

    @property
    def reasons(self) -> list[Reason]:
        """Sorted by severity, then by age."""
        every = {**self._faults, **self._findings}
        return sorted(every.values(), key=lambda reason: (-reason.severity, reason.since_s, reason.code))

    @property
    def fit(self) -> bool:
        return self.state <= State.DEGRADED

    @property
    def unusable(self) -> bool:
        """No task can start: a reason of severity NO_ENGINE or more holds. False during a check."""
        return not self._checking and any(reason.severity >= Severity.NO_ENGINE for reason in self.reasons)

    @property
    def barred(self) -> bool:
        """No engine process may use the device: a reason of severity UNUSABLE holds. False during a check."""
        return not self._checking and any(reason.severity is Severity.UNUSABLE for reason in self.reasons)

    def find(self, findings: Iterable[Reason], now_s: float) -> None:
        """Replace the findings by those observed now."""
        before, self._findings = self._findings, {}
        for finding in findings:
            old = before.get(finding.code)
            since_s = now_s if old is None else old.since_s
            self._findings[finding.code] = Reason(finding.code, finding.message, finding.severity, since_s)
        for code, reason in before.items():
            if reason.severity >= Severity.SICK and code not in self._findings:
                self._faults[code] = reason
        if self._checking and self._blocked():
            self._set_back(now_s)
        self._derive(now_s)

    def happen(self, code: str, message: str, severity: Severity, now_s: float, *, at_once: bool = False) -> None:
        """Add a fault. `at_once`: check a fit device without delay, and do not lengthen the delays of later checks."""
        setbacks = self._setbacks if at_once and self.fit else None
        old = self._faults.get(code)
        if old is not None:
            severity = max(severity, old.severity)
        self._faults[code] = Reason(code, message, severity, now_s if old is None else old.since_s)
        if self._checking and severity >= Severity.SICK:
            self._set_back(now_s)
        self._derive(now_s)
        if setbacks is not None:
            self._setbacks, self.next_check_s = setbacks, now_s

    def check_due(self, now_s: float) -> bool:
        return self.state is State.SICK and not self._blocked() and now_s >= self.next_check_s

    def reset_seen(self, now_s: float) -> None:
        """The device was reset: drop the delay that failed checks have added."""
        if not self._checking:
            self.next_check_s = min(self.next_check_s, max(now_s, self._first_check_s))

    def begin_check(self, now_s: float) -> None:
        assert self.state is State.SICK
        self._checking = True
        self._derive(now_s)

    @property
    def checking(self) -> bool:
        """Whether a check is in progress. A finding or fault of severity SICK or more ends it early."""
        return self._checking

    def pass_check(self, now_s: float) -> None:
        assert self._checking
        self._checking = False
        self._faults = {code: reason for code, reason in self._faults.items() if reason.severity < Severity.SICK}
        self._derive(now_s)

    def fail_check(self, code: str, message: str, severity: Severity, now_s: float) -> None:
        assert self._checking
        self.happen(code, message, severity, now_s)

    def pass_time(self, now_s: float) -> None:
        """Remove old faults of severity DEGRADED."""
        faults = self._faults
        old = [c for c, r in faults.items() if r.severity < Severity.SICK and now_s - r.since_s >= NOTICE_S]
        for code in old:
            del faults[code]
        if old:
            self._derive(now_s)

    def _blocked(self) -> bool:
        return any(reason.severity >= Severity.SICK for reason in self._findings.values())

    def _set_back(self, now_s: float) -> None:
        self._checking = False
        self.next_check_s = now_s + min(CHECK_MAX_S, CHECK_MIN_S * 2.0 ** min(self._setbacks, DOUBLINGS_MAX))
        self._setbacks += 1

    def _derive(self, now_s: float) -> None:
        worst = max((reason.severity for reason in self.reasons), default=None)
        if worst is not None and worst >= Severity.SICK:
            state = State.RECOVERING if self._checking else State.SICK
        else:
            state = State.HEALTHY if worst is None else State.DEGRADED
        if state >= State.SICK and self.fit:
            if now_s - self._fit_s >= STEADY_S:
                self._setbacks = 0
            self._set_back(now_s)
            self._first_check_s = self.next_check_s
        elif state <= State.DEGRADED and not self.fit:
            self._fit_s = now_s
        if state is not self.state:
            self.state, self.since_s = state, now_s
