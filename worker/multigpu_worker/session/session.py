"""The leases that a worker holds, and its reports and partial outputs that the master may not have.

Pure: no clock, no socket, no process. Events come in as method calls (granted, revoked, reported, the stream broke, a
welcome came); the results say what to cancel, what to send next, and what to list in a hello or a heartbeat.

A lease is here from its grant until its report is sent, or until the master doesn't want it any more. Work goes on
while the stream is down. Reports sent just before a break may or may not have reached the master, so the last frames of
reports are kept for a while: hello lists their leases too, and those that the master adopts are reported again. So no
result is computed twice because an acknowledgement was lost; and a lease whose report did arrive is not adopted, so
nothing counts twice.

Outputs leave in the order in which they were made. A frame contains first reports, then partial outputs. The partial
outputs of a task are always in an earlier frame than its report, so the master may read the two parts in any order.
"""

from collections import deque
from collections.abc import Container, Iterable, Sized
from dataclasses import dataclass
from enum import Enum

from multigpu._handling.attempts import last_lines

from multigpu_worker.device.energy import NO_USAGE, Usage
from multigpu_worker.session.lease import Lease

# Maximum size of a group of reports. A larger report is a group by itself.
GROUP_BYTES_MAX = 4 << 20
# Estimated size of a report without its result, error and log.
REPORT_BYTES = 32
# Limit of the checkpoints and logs in one hello or heartbeat; the others wait for the next heartbeat.
CHECKPOINT_BYTES_MAX = 32 << 20
# Limit of a partial output and its checkpoint together: a message above 64 MiB would break the stream.
PARTIAL_BYTES_MAX = 63 << 20


class ReportState(Enum):
    SUCCEEDED = 1
    FAILED = 2
    RETURNED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskError:
    """The fields are those of multigpu.v1.TaskError."""

    type: str
    message: str
    retryable: bool
    traceback: str = ""


@dataclass(slots=True)
class Report:
    lease: Lease
    state: ReportState
    # The result's bytes, or a Reference, whose len() is the result's size.
    result: bytes | Sized = b""
    content_type: str = ""
    error: TaskError | None = None
    # The attempt ended its engine process, or broke its device's context.
    broke_engine: bool = False


@dataclass(slots=True)
class Reports:
    """Reports of tasks that ran together. Instants in nanoseconds since 1970."""

    start_ns: int
    finish_ns: int
    reports: list[Report]
    # Estimated size in a frame.
    size_bytes: int
    # The same, with the partial outputs that are kept to be sent again.
    kept_bytes: int
    usage: Usage = NO_USAGE


@dataclass(slots=True)
class Partial:
    lease: Lease
    # Position among the task's outputs, over all attempts, from 0.
    index: int
    data: bytes
    content_type: str
    # Saved before this output, and not sent yet.
    checkpoint: bytes | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.data) + len(self.checkpoint or b"") + REPORT_BYTES


@dataclass(slots=True)
class Frame:
    """What to send next."""

    reports: list[Reports]
    partials: list[Partial]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A lease as hello and heartbeats list it."""

    lease: Lease
    # None: unchanged since it was last sent, or left for a later heartbeat.
    checkpoint: bytes | None
    # Empty: unchanged since it was last sent, or left for a later heartbeat.
    log: str


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
        # The master has welcomed the worker, and the stream has not broken since.
        self.connected = False
        # The incarnation of the master that granted or adopted the held leases. Empty: the master sent none.
        self.incarnation = ""
        # Not reported yet, oldest first.
        self.leases: dict[int, Lease] = {}
        # Size of what `_outbox` contains.
        self.unsent_bytes = 0
        # The next frame must be a heartbeat. Also set when a failed lease has an unsent checkpoint, which the master
        # would ignore after the lease's report.
        self.heartbeat_due = False
        self._outbox: deque[Reports | Partial] = deque()
        self._sent: deque[tuple[float, Reports]] = deque()
        self._sent_bytes = 0
        self._sent_reports = 0

    # From the master.

    def grant(self, leases: Iterable[Lease]) -> None:
        assert self.connected
        for lease in leases:
            assert lease.lease_id not in self.leases
            self.leases[lease.lease_id] = lease

    def revoke(self, lease_id: int) -> Lease | None:
        """Forget a lease. Returns None if it is not held, for example because it was reported meanwhile."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            lease.dropped = True
            # Nothing of it is run or sent any more, and the batcher has it until its queue can run.
            lease.release_inputs()
            lease.partials = lease.checkpoint_saved = None
        return lease

    def recall(self, lease_ids: Iterable[int]) -> list[Lease]:
        """The master wants these leases back if no engine has begun them. Returns those that are held."""
        asked = [lease for lease_id in lease_ids if (lease := self.leases.get(lease_id)) is not None]
        for lease in asked:
            lease.recalled = True
        return asked

    def welcome(self, adopted_lease_ids: Iterable[int], incarnation: str = "") -> list[Lease]:
        """A session begins. Returns the leases that the master didn't adopt, to be cancelled in the engines."""
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
                size_bytes = sum(map(_size_of, wanted))
                kept_bytes = size_bytes + sum(report.lease.partial_bytes for report in wanted)
                self._push(Reports(group.start_ns, group.finish_ns, wanted, size_bytes, kept_bytes, group.usage))
        return unwanted

    def stream_broken(self) -> list[Lease]:
        """The stream is gone. Returns the leases that can't be resumed, to be cancelled in the engines."""
        self.connected = False
        lost = [lease for lease in self.leases.values() if not lease.resumable]
        for lease in lost:
            self.revoke(lease.lease_id)
        return lost

    # From the engines.

    def report(self, start_ns: int, finish_ns: int, reports: Iterable[Report], usage: Usage = NO_USAGE) -> None:
        """Queue reports, except those of leases that are not held any more."""
        group: list[Report] = []
        size_bytes = partial_bytes = 0
        for report in reports:
            lease = report.lease
            if self.leases.pop(lease.lease_id, None) is None:
                continue
            lease.release_inputs()
            if lease.checkpoint_unsent and report.state is not ReportState.SUCCEEDED:
                self.heartbeat_due = True
            report_bytes = _size_of(report)
            if group and size_bytes + report_bytes > GROUP_BYTES_MAX:
                self._push(Reports(start_ns, finish_ns, group, size_bytes, size_bytes + partial_bytes, usage))
                group, size_bytes, partial_bytes = [], 0, 0
            group.append(report)
            size_bytes += report_bytes
            partial_bytes += lease.partial_bytes
        if group:
            self._push(Reports(start_ns, finish_ns, group, size_bytes, size_bytes + partial_bytes, usage))

    def partial(self, lease: Lease, data: bytes, content_type: str = "") -> bool:
        """Queue a partial output. Returns False if the lease can't go on: then the engine must cancel it."""
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
            saved = lease.checkpoint_saved if lease.checkpoint_unsent else None
            if saved is not None:
                # A checkpoint that does not fit is sent with the next output, or with a heartbeat after this output.
                lease.checkpoint_unsent = len(data) + len(saved) > PARTIAL_BYTES_MAX
                saved = None if lease.checkpoint_unsent else saved
            self._push(Partial(lease, index, data, content_type, saved))
        elif not lease.resumable:
            self.revoke(lease.lease_id)
            return False
        return True

    def save(self, lease: Lease, checkpoint: bytes) -> None:
        lease.checkpoint_saved = checkpoint
        lease.checkpoint_unsent = True

    @staticmethod
    def log(lease: Lease, text: str) -> None:
        """Add lines to a task's log. They go with the next heartbeat, or with the report."""
        lease.log = last_lines(lease.log + text)
        lease.log_unsent = True

    def return_all_leases(self, reason: str, now_ns: int, kept: Container[int] = ()) -> None:
        """Return all leases uncharged, except those in `kept`."""
        self.return_leases([lease for lease_id, lease in self.leases.items() if lease_id not in kept], reason, now_ns)

    def return_leases(self, leases: Iterable[Lease], reason: str, now_ns: int, error_type: str = "Returned") -> None:
        """Return leases uncharged."""
        leases = list(leases)
        for lease in leases:
            lease.dropped = True
        error = TaskError(type=error_type, message=reason, retryable=True)
        self.report(now_ns, now_ns, [Report(lease, ReportState.RETURNED, error=error) for lease in leases])

    # To the master.

    def held(self, *, hello: bool) -> list[Held]:
        """The leases that a heartbeat lists, with unsent checkpoints and logs.

        `hello`: only the resumable ones, also those whose reports may have been lost, and every checkpoint and log.
        """
        reported = [group for group in self._outbox if isinstance(group, Reports)]
        if hello:
            reported += [group for _, group in self._sent]
        # Reported leases are first: a checkpoint that is sent after the report is too late.
        leases = [report.lease for group in reported for report in group.reports]
        leases += self.leases.values()
        if hello:
            leases = [lease for lease in leases if lease.resumable]
        # Leases with queued outputs. A checkpoint must not be sent before these outputs: an attempt that begins with it
        # would not make them again.
        later = set() if hello else {entry.lease.lease_id for entry in self._outbox if isinstance(entry, Partial)}
        later &= self.leases.keys()
        left_bytes = CHECKPOINT_BYTES_MAX
        listed = []
        for lease in leases:
            due = hello or (lease.checkpoint_unsent and lease.lease_id not in later)
            checkpoint = lease.checkpoint_saved if due else None
            if checkpoint is not None:
                left_bytes -= len(checkpoint)
                lease.checkpoint_unsent = left_bytes < 0
                if left_bytes < 0:
                    checkpoint = None
            log = lease.log if hello or lease.log_unsent else ""
            left_bytes -= len(log.encode())
            lease.log_unsent = bool(log) and left_bytes < 0
            if left_bytes < 0:
                log = ""
            listed.append(Held(lease=lease, checkpoint=checkpoint, log=log))
        failed = [r.lease for g in reported for r in g.reports if r.state is not ReportState.SUCCEEDED]
        self.heartbeat_due = not hello and any(lease.checkpoint_unsent for lease in failed)
        return listed

    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def take_frame(self, bytes_max: int, now_s: float) -> Frame:
        """Pop the next frame from the outbox: at most `bytes_max`, but at least one entry if there is any."""
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
                size_bytes = entry.size_bytes
                if frame_bytes and frame_bytes + size_bytes > bytes_max:
                    break
                frame.partials.append(entry)
            self._outbox.popleft()
            frame_bytes += size_bytes
        self.unsent_bytes -= frame_bytes
        return frame

    def _push(self, entry: Reports | Partial) -> None:
        self._outbox.append(entry)
        self.unsent_bytes += entry.size_bytes

    def _resend_partials(self, lease: Lease) -> None:
        for index, part in enumerate(lease.partials or ()):
            self._push(Partial(lease, lease.partials_received + index, *part))

    def _remember(self, group: Reports, now_s: float) -> None:
        """Keep a group that is being sent, and drop the oldest ones beyond the limits."""
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


def _size_of(report: Report) -> int:
    """An estimate of a report's size in a frame."""
    size_bytes = len(report.result) + REPORT_BYTES
    if report.lease.log:
        size_bytes += len(report.lease.log.encode())
    if report.error is not None:
        size_bytes += len(report.error.message.encode()) + len(report.error.traceback.encode())
    return size_bytes
