"""What a worker holds and owes: the leases it was granted, and the words about them that the master hasn't got yet.

Pure: no clock, no socket, no process. Events come in as method calls (granted, revoked, reported, the stream broke, a
welcome came), values come out: what to cancel, what to send next, what to list in a hello or a heartbeat. agent.py
feeds it from both sides.

A lease lives here from its grant until its report was sent, or until the master doesn't want it any more. Work goes
on while the stream is down. Whatever was reported just before the stream broke may or may not have reached the master,
so the last frames of reports are kept for a while: hello lists their leases too, and those that the master takes back
are reported again. A result is thus not computed twice for the want of an acknowledgement, and a lease whose report
did arrive is not taken back, so nothing is counted twice.

Outputs leave in the order in which they were made. A frame is a run of reports and then of partial outputs, so that in
whichever order its parts are read, the partials of a task come before its report.
"""

from collections import deque
from collections.abc import Container, Iterable, Sized
from dataclasses import dataclass, field
from enum import Enum

from multigpu_worker.device.energy import Energy

# Reports that leave together are cut at this many bytes, so that no frame nears the limit of a message.
GROUP_BYTES_MAX = 4 << 20
# What a report costs beside its result.
REPORT_BYTES = 32
# No limit on how many leases run together.
TOGETHER_MAX = 1 << 30
# Checkpoints in one hello or heartbeat; the rest waits for the next one.
CHECKPOINT_BYTES_MAX = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What the tasks of a batch share."""

    kind: str
    model: str = ""
    parameters: tuple[tuple[str, str], ...] = ()
    content_type: str = ""
    # 0: no limit.
    run_timeout_s: float = 0.0
    # The results are kept for long.
    durable: bool = True
    # From 1, which goes first, to 5.
    priority: int = 3


@dataclass(eq=False)
class Lease:
    """One attempt in our hands. Most come and go by the thousand: what they don't need stays with the class."""

    lease_id: int
    task_id: int
    attempt: int
    spec: Spec
    # Bytes, or a reference to them, whose length is theirs.
    payload: bytes | Sized
    units: int = 1
    # Shows a later master that the lease was granted to us. 0: the master is older than that.
    proof: int = 0
    # What the attempt before left for this one.
    checkpoint: bytes = b""
    partials_received: int = 0
    # These outputs, if they are few; else none.
    partials_before: tuple[bytes, ...] = ()
    traceparent: str = ""
    # False: its partials were too much to keep, so this attempt can't outlive its stream.
    resumable: bool = True
    # The engine has begun it.
    running: bool = field(default=False, init=False)
    # Nobody wants it any more.
    dropped: bool = field(default=False, init=False)
    # Its place among all that wait (batcher.py), once it has gone to an engine.
    rank: int = field(default=0, init=False)
    # The master wants it back, unless it is begun.
    recalled: bool = field(default=False, init=False)
    # The largest batch that it may join. Less than the usual after an engine ended with it; 1: it is a suspect.
    together_max: int = field(default=TOGETHER_MAX, init=False)
    # How often it was a suspect; and whether it is one no more, as it went on past where its engine ended.
    suspected: int = field(default=0, init=False)
    cleared: bool = field(default=False, init=False)
    # Of this attempt's outputs, how many there were when it was last handed to an engine.
    partials_dispatched: int = field(default=0, init=False)
    # How often an engine ended with it inside for no reason that could be told.
    deaths: int = field(default=0, init=False)
    fraction: float = field(default=0.0, init=False)
    steps: int = field(default=0, init=False)
    note: str = field(default="", init=False)
    # What this attempt leaves for the next one; None: nothing yet.
    saved: bytes | None = field(default=None, init=False)
    saved_unsent: bool = field(default=False, init=False)
    # Partial outputs of this attempt, kept for a master that has to be told again; how many were made, and their bytes.
    partials: list[tuple[bytes, str]] | None = field(default=None, init=False)
    partials_made: int = field(default=0, init=False)
    partial_bytes: int = field(default=0, init=False)

    @property
    def suspect(self) -> bool:
        """It may have ended an engine: it runs beside none but those that are cleared."""
        return self.together_max == 1


class ReportState(Enum):
    SUCCEEDED = 1
    FAILED = 2
    RETURNED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskError:
    """Why an attempt did not succeed; the fields are those of multigpu.v1.TaskError."""

    type: str
    message: str
    retryable: bool
    traceback: str = ""


@dataclass(slots=True)
class Report:
    """Our word about one lease."""

    lease: Lease
    state: ReportState
    # As a lease's payload.
    result: bytes | Sized = b""
    content_type: str = ""
    error: TaskError | None = None
    # The attempt took its engine, or its device's context, down with it.
    broke_engine: bool = False


@dataclass(slots=True)
class Reports:
    """Reports of tasks that ran together, between two instants of our clock in nanoseconds since 1970."""

    start_ns: int
    finish_ns: int
    reports: list[Report]
    # On the wire.
    size_bytes: int
    # While it is kept: partial outputs are kept with it.
    kept_bytes: int
    # What they took of the device's energy. None: it wasn't measured.
    energy: Energy | None = None


@dataclass(slots=True)
class Partial:
    lease: Lease
    # Position among the task's outputs, over all attempts, from 0.
    index: int
    data: bytes
    content_type: str


@dataclass(slots=True)
class Frame:
    """What to send next."""

    reports: list[Reports]
    partials: list[Partial]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A lease as hello and heartbeats list it."""

    lease: Lease
    # None: unchanged since it was last sent.
    checkpoint: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    # Partial outputs of one task kept for a reconnect.
    partial_bytes_max: int = 16 << 20
    # Reports kept after they were sent, by bytes, number and age.
    sent_bytes_max: int = 16 << 20
    sent_reports_max: int = 4096
    sent_age_s: float = 10.0


class Session:
    def __init__(self, limits: SessionLimits) -> None:
        self.limits = limits
        # Welcomed, and the stream has not broken since.
        self.connected = False
        # The life of the master that granted our leases, or took them back. Empty: it did not say.
        self.incarnation = ""
        # Not reported yet, oldest first.
        self.leases: dict[int, Lease] = {}
        # Bytes of results and partials that were not sent yet.
        self.unsent_bytes = 0
        # A heartbeat must go out before anything else: a checkpoint would come too late after the report.
        self.heartbeat_due = False
        self._outbox: deque[Reports | Partial] = deque()
        self._sent: deque[tuple[float, Reports]] = deque()
        self._sent_bytes = 0
        self._sent_reports = 0

    # The master speaks.

    def grant(self, leases: Iterable[Lease]) -> None:
        assert self.connected
        for lease in leases:
            assert lease.lease_id not in self.leases
            self.leases[lease.lease_id] = lease

    def revoke(self, lease_id: int) -> Lease | None:
        """Forget a lease. Returns it if it still was ours to work on; it may have been reported meanwhile."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            lease.dropped = True
        return lease

    def recall(self, lease_ids: Iterable[int]) -> list[Lease]:
        """Note that the master wants these back, as far as no engine has begun them. Returns those that we hold."""
        asked = [lease for lease_id in lease_ids if (lease := self.leases.get(lease_id)) is not None]
        for lease in asked:
            lease.recalled = True
        return asked

    def welcome(self, adopted_lease_ids: Iterable[int], incarnation: str = "") -> list[Lease]:
        """Begin a connected life. Returns the leases that nobody wants any more, to be cancelled in the engine."""
        assert not self.connected
        self.connected = True
        self.incarnation = incarnation
        adopted = set(adopted_lease_ids)
        unwanted = [lease for lease_id, lease in self.leases.items() if lease_id not in adopted]
        for lease in unwanted:
            self.revoke(lease.lease_id)
        groups = [group for _, group in self._sent] + [item for item in self._outbox if isinstance(item, Reports)]
        self._sent.clear()
        self._sent_bytes = self._sent_reports = 0
        self._outbox.clear()
        self.unsent_bytes = 0
        for lease in self.leases.values():
            self._resend_partials(lease)
        for group in groups:
            wanted = [report for report in group.reports if report.lease.lease_id in adopted and report.lease.resumable]
            for report in wanted:
                self._resend_partials(report.lease)
            if wanted:
                size_bytes = sum(len(report.result) + REPORT_BYTES for report in wanted)
                kept_bytes = size_bytes + sum(report.lease.partial_bytes for report in wanted)
                self._push(Reports(group.start_ns, group.finish_ns, wanted, size_bytes, kept_bytes, group.energy))
        return unwanted

    def break_stream(self) -> list[Lease]:
        """The stream is gone. Returns the leases that no other stream can resume, to be cancelled in the engine."""
        self.connected = False
        lost = [lease for lease in self.leases.values() if not lease.resumable]
        for lease in lost:
            self.revoke(lease.lease_id)
        return lost

    # The engine speaks.

    def report(self, start_ns: int, finish_ns: int, reports: Iterable[Report], energy: Energy | None = None) -> None:
        """Owe the master these reports. Those of leases that are not ours any more are left out."""
        group: list[Report] = []
        size_bytes = partial_bytes = 0
        for report in reports:
            lease = report.lease
            if self.leases.pop(lease.lease_id, None) is None:
                continue
            lease.payload = b""
            if lease.saved_unsent and report.state is not ReportState.SUCCEEDED:
                self.heartbeat_due = True
            report_bytes = len(report.result) + REPORT_BYTES
            if group and size_bytes + report_bytes > GROUP_BYTES_MAX:
                self._push(Reports(start_ns, finish_ns, group, size_bytes, size_bytes + partial_bytes, energy))
                group, size_bytes, partial_bytes = [], 0, 0
            group.append(report)
            size_bytes += report_bytes
            partial_bytes += lease.partial_bytes
        if group:
            self._push(Reports(start_ns, finish_ns, group, size_bytes, size_bytes + partial_bytes, energy))

    def partial(self, lease: Lease, data: bytes, content_type: str = "") -> bool:
        """Owe the master a partial output. False: the lease can't go on, cancel it in the engine."""
        if lease.dropped:
            return True
        index = lease.partials_received + lease.partials_made
        lease.partials_made += 1
        lease.partial_bytes += len(data)
        if lease.resumable:
            if lease.partials is None:
                lease.partials = []
            lease.partials.append((data, content_type))
            if lease.partial_bytes > self.limits.partial_bytes_max:
                lease.resumable = False
                lease.partials = None
                lease.partial_bytes = 0
        if self.connected:
            self._push(Partial(lease, index, data, content_type))
        elif not lease.resumable:
            self.revoke(lease.lease_id)
            return False
        return True

    def save(self, lease: Lease, checkpoint: bytes) -> None:
        lease.saved = checkpoint
        lease.saved_unsent = True

    def return_all(self, reason: str, now_ns: int, kept: Container[int] = ()) -> None:
        """Give back whatever is not reported, uncharged, but for the leases that are kept."""
        self.give_back([lease for lease_id, lease in self.leases.items() if lease_id not in kept], reason, now_ns)

    def give_back(self, leases: Iterable[Lease], reason: str, now_ns: int, error_type: str = "Returned") -> None:
        """Return these, uncharged."""
        leases = list(leases)
        for lease in leases:
            lease.dropped = True
        error = TaskError(type=error_type, message=reason, retryable=True)
        self.report(now_ns, now_ns, [Report(lease, ReportState.RETURNED, error=error) for lease in leases])

    # What goes to the master.

    def held(self, *, hello: bool) -> list[Held]:
        """List what a heartbeat lists; or a hello: every checkpoint, and reports that the stream may have lost."""
        reported = [group for group in self._outbox if isinstance(group, Reports)]
        if hello:
            reported += [group for _, group in self._sent]
        leases = list(self.leases.values())
        leases += [report.lease for group in reported for report in group.reports]
        if hello:
            leases = [lease for lease in leases if lease.resumable]
        left_bytes = CHECKPOINT_BYTES_MAX
        listed = []
        for lease in leases:
            checkpoint = lease.saved if hello or lease.saved_unsent else None
            if checkpoint is not None:
                left_bytes -= len(checkpoint)
                lease.saved_unsent = left_bytes < 0
                if left_bytes < 0:
                    checkpoint = None
            listed.append(Held(lease=lease, checkpoint=checkpoint))
        self.heartbeat_due = False
        return listed

    def has_unsent(self) -> bool:
        """True while something waits to be sent."""
        return bool(self._outbox)

    def take_frame(self, bytes_max: int, now_s: float) -> Frame:
        """Take what goes out next, at least one report or partial if there is any, else no more than so many bytes."""
        assert self.connected
        frame = Frame([], [])
        frame_bytes = 0
        while self._outbox:
            entry = self._outbox[0]
            if isinstance(entry, Reports):
                size_bytes = entry.size_bytes
                if frame.partials or (frame_bytes and frame_bytes + size_bytes > bytes_max):
                    break
                frame.reports.append(entry)
                self._remember(entry, now_s)
            else:
                size_bytes = len(entry.data) + REPORT_BYTES
                if frame_bytes and frame_bytes + size_bytes > bytes_max:
                    break
                frame.partials.append(entry)
            self._outbox.popleft()
            frame_bytes += size_bytes
        self.unsent_bytes -= frame_bytes
        return frame

    def _push(self, entry: Reports | Partial) -> None:
        self._outbox.append(entry)
        self.unsent_bytes += entry.size_bytes if isinstance(entry, Reports) else len(entry.data) + REPORT_BYTES

    def _resend_partials(self, lease: Lease) -> None:
        for index, part in enumerate(lease.partials or ()):
            self._push(Partial(lease, lease.partials_received + index, *part))

    def _remember(self, group: Reports, now_s: float) -> None:
        """Keep a group that is being sent, and forget the oldest past the limits."""
        self._sent.append((now_s, group))
        self._sent_bytes += group.kept_bytes
        self._sent_reports += len(group.reports)
        while self._sent and (
            self._sent_bytes > self.limits.sent_bytes_max
            or self._sent_reports > self.limits.sent_reports_max
            or self._sent[0][0] < now_s - self.limits.sent_age_s
        ):
            _, oldest = self._sent.popleft()
            self._sent_bytes -= oldest.kept_bytes
            self._sent_reports -= len(oldest.reports)
