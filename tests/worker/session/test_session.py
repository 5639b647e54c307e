"""The session as values: leases in hello, reports sent and resent, and reports dropped."""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from multigpu._transport.payloads import Reference, Segment
from multigpu.v1 import worker_service_pb2 as pb
from multigpu_worker.composition import RESULT_BYTES_MAX
from multigpu_worker.session.lease import Lease, Spec
from multigpu_worker.session.master_connection import MESSAGE_BYTES_MAX
from multigpu_worker.session.session import (
    GROUP_BYTES_MAX,
    REPORT_BYTES,
    Frame,
    Report,
    ReportState,
    Session,
    SessionLimits,
    TaskError,
)
from multigpu_worker.session.wire import request_of

SPEC = Spec(kind="k")
FRAME_BYTES = 4 << 20
FAILURE = TaskError(type="ValueError", message="no", retryable=True)


def connected(limits: SessionLimits | None = None) -> Session:
    session = Session(limits or SessionLimits())
    assert session.welcome([]) == []
    return session


@pytest.fixture
def session() -> Session:
    return connected()


def grant(session: Session, *lease_ids: int) -> list[Lease]:
    leases = [Lease(n, n + 100, 1, SPEC, b"payload") for n in lease_ids]
    session.grant(leases)
    return leases


def succeed(session: Session, *leases: Lease, result: bytes = b"r") -> None:
    session.report(1, 2, [Report(lease, ReportState.SUCCEEDED, result) for lease in leases])


def frame(session: Session, now_s: float = 0.0) -> Frame:
    return session.take_frame(FRAME_BYTES, now_s)


def reported(taken: Frame) -> list[int]:
    return [report.lease.lease_id for group in taken.reports for report in group.reports]


def held(session: Session, *, hello: bool = False) -> list[int]:
    return sorted(entry.lease.lease_id for entry in session.held(hello=hello))


def test_a_lease_is_held_until_its_report_is_sent_and_a_revoked_one_reports_nothing(session: Session) -> None:
    one, two = grant(session, 1, 2)
    succeed(session, one)
    assert held(session) == [1, 2]  # not sent yet: a heartbeat without it would say that it is lost
    assert reported(frame(session)) == [1]
    assert held(session) == [2]
    assert not session.has_unsent()
    assert session.unsent_bytes == 0
    succeed(session, two)
    assert reported(frame(session)) == [2]
    one, two = grant(session, 3, 4)
    assert session.revoke(3) is one
    assert one.dropped
    assert session.revoke(3) is None
    assert session.revoke(77) is None
    assert session.partial(one, b"x")
    assert not session.has_unsent()
    succeed(session, one, two)
    assert reported(frame(session)) == [4]
    assert session.revoke(4) is None  # reported already


def test_a_lease_that_need_not_run_keeps_no_bytes_for_a_run(session: Session) -> None:
    """The batcher may have it for long, if its model never loads."""
    leases = grant(session, 1, 2, 3)
    for lease in leases:
        lease.checkpoint, lease.partials_before = b"checkpoint", (b"before",)
        session.partial(lease, b"partial")
        session.save(lease, b"saved")
    assert session.revoke(1) is leases[0]
    session.return_leases(leases[1:2], "no model", 1)
    succeed(session, leases[2])
    for lease in leases:
        assert (lease.payload, lease.checkpoint, lease.partials_before) == (b"", b"", ())
    assert (leases[0].partials, leases[0].checkpoint_saved) == (None, None)
    assert (leases[1].partials, leases[1].checkpoint_saved) == ([(b"partial", "")], b"saved"), "they may be sent again"


def test_frames_are_bounded(session: Session) -> None:
    leases = grant(session, *range(1, 11))
    succeed(session, *leases, result=b"x" * (3 << 20))
    sizes = []
    while session.has_unsent():
        taken = frame(session)
        sizes.append(sum(group.size_bytes for group in taken.reports))
    assert len(sizes) == 10
    assert max(sizes) <= GROUP_BYTES_MAX
    (huge,) = grant(session, 11)
    succeed(session, huge, result=b"x" * (50 << 20))
    assert reported(frame(session)) == [11]  # alone, but it goes


def test_after_a_break_hello_lists_what_may_be_lost_to_the_master_that_welcomed_last(session: Session) -> None:
    leases = grant(session, 1, 2, 3, 4)
    succeed(session, leases[0])
    frame(session)
    succeed(session, leases[1])
    assert session.stream_broken() == []
    succeed(session, leases[2])  # work goes on
    assert held(session, hello=True) == [1, 2, 3, 4]
    unwanted = session.welcome([1, 3])
    assert unwanted == [leases[3]]
    assert leases[3].dropped
    assert reported(frame(session)) == [1, 3]
    assert held(session) == []
    assert session.incarnation == ""
    session.stream_broken()
    session.welcome([], "the second")
    session.stream_broken()
    assert session.incarnation == "the second"


def test_sent_reports_are_kept_within_limits() -> None:
    session = connected(SessionLimits(sent_reports_max=3, sent_bytes_max=10_000, sent_age_s=5))
    leases = grant(session, *range(1, 20))
    for n, lease in enumerate(leases[:5]):
        succeed(session, lease)
        frame(session, now_s=n)
    assert held(session, hello=True)[-3:] == [17, 18, 19]
    session.stream_broken()
    assert {3, 4, 5} <= set(held(session, hello=True))
    assert not {1, 2} & set(held(session, hello=True))
    session.welcome(range(6, 20))
    succeed(session, leases[5], result=b"x" * 6000)
    frame(session, now_s=10)
    succeed(session, leases[6], result=b"x" * 6000)
    frame(session, now_s=11)
    assert 6 not in held(session, hello=True)
    succeed(session, leases[7])
    frame(session, now_s=30)
    assert not {6, 7} & set(held(session, hello=True))


def test_partials_come_before_their_report_and_again_after_a_break_and_hold_up_no_others(session: Session) -> None:
    (lease,) = grant(session, 1)
    lease.partials_received = 5
    for data in (b"a", b"b"):
        assert session.partial(lease, data)
    succeed(session, lease)
    first, second = frame(session), frame(session)
    assert [(p.index, p.data) for p in first.partials] == [(5, b"a"), (6, b"b")]
    assert reported(first) == []
    assert (reported(second), second.partials) == ([1], [])
    session.stream_broken()
    session.welcome([1])
    assert [p.index for p in frame(session).partials] == [5, 6]
    assert reported(frame(session)) == [1]
    talker, other = grant(session, 2, 3)
    session.partial(talker, b"a")
    succeed(session, other)
    session.partial(talker, b"b")
    taken = frame(session)
    assert ([p.data for p in taken.partials], reported(taken)) == ([b"a"], [])
    taken = frame(session)
    assert ([p.data for p in taken.partials], reported(taken)) == ([b"b"], [3])


def test_too_many_partials_are_not_kept_and_end_with_the_stream() -> None:
    session = connected(SessionLimits(partial_bytes_max=100))
    one, two, three = grant(session, 1, 2, 3)
    for _ in range(3):
        assert session.partial(one, b"x" * 40)  # goes on while the stream lasts
        assert session.partial(two, b"x" * 40)
    succeed(session, two)
    assert [p.index for p in frame(session).partials if p.lease is one] == [0, 1, 2]
    frame(session)
    assert one.partials is None
    assert session.stream_broken() == [one]
    assert held(session, hello=True) == [3]  # the report of 2 can't be given again either: its partials are gone
    assert session.partial(three, b"x" * 40)
    assert not session.partial(three, b"x" * 70)
    assert session.leases == {}
    session.welcome([1, 2, 3])
    assert not session.has_unsent()


def test_checkpoints_are_sent_when_they_changed_and_before_a_failure(session: Session) -> None:
    one, two = grant(session, 1, 2)
    session.save(one, b"c1")
    assert [entry.checkpoint for entry in session.held(hello=False)] == [b"c1", None]
    assert [entry.checkpoint for entry in session.held(hello=False)] == [None, None]
    session.save(two, b"c2")
    session.report(1, 2, [Report(two, ReportState.FAILED, error=FAILURE)])
    assert session.heartbeat_due
    assert {e.lease.lease_id: e.checkpoint for e in session.held(hello=False)} == {1: None, 2: b"c2"}
    assert not session.heartbeat_due
    session.stream_broken()
    assert {e.lease.lease_id: e.checkpoint for e in session.held(hello=True)} == {1: b"c1", 2: b"c2"}


def test_a_partial_output_carries_the_checkpoint_that_was_saved_before_it(session: Session) -> None:
    (lease,) = grant(session, 1)
    session.partial(lease, b"p0")
    session.save(lease, b"after p0")
    # The checkpoint must not reach the master before p0, which the next attempt would leave out.
    assert [entry.checkpoint for entry in session.held(hello=False)] == [None]
    session.partial(lease, b"p1")
    session.partial(lease, b"p2")
    sent = [(p.data, p.checkpoint) for p in frame(session).partials]
    assert sent == [(b"p0", None), (b"p1", b"after p0"), (b"p2", None)]
    session.save(lease, b"after p2")
    assert [entry.checkpoint for entry in session.held(hello=False)] == [b"after p2"]


def test_checkpoints_that_are_too_many_for_one_heartbeat_go_with_the_next(session: Session) -> None:
    for lease in grant(session, *range(1, 41)):
        session.save(lease, bytes(1 << 20))
    for hello in (True, False):
        sent = [entry.lease.lease_id for entry in session.held(hello=hello) if entry.checkpoint is not None]
        assert sent == (list(range(1, 33)) if hello else list(range(33, 41)))
    assert all(entry.checkpoint is None for entry in session.held(hello=False))


def test_checkpoints_of_failed_attempts_all_leave_before_the_reports(session: Session) -> None:
    leases = grant(session, *range(1, 81))
    for lease in leases:
        session.save(lease, bytes(1 << 20))
    failed = leases[:40]  # more than one heartbeat has space for
    session.report(1, 2, [Report(lease, ReportState.FAILED, error=FAILURE) for lease in failed])
    sent: list[int] = []
    beats = 0
    while session.heartbeat_due:
        beats += 1
        sent += [entry.lease.lease_id for entry in session.held(hello=False) if entry.checkpoint is not None]
    assert set(range(1, 41)) <= set(sent)
    assert beats == 2
    assert reported(frame(session)) == list(range(1, 41))


def test_a_checkpoint_that_does_not_fit_beside_a_partial_output_goes_with_the_heartbeat_after_it(
    session: Session,
) -> None:
    (lease,) = grant(session, 1)
    session.save(lease, bytes(1 << 20))
    session.partial(lease, bytes(RESULT_BYTES_MAX))
    sent = request_of(frame(session))
    request = pb.SessionRequest.FromString(sent)
    assert [len(partial.data) for partial in request.partials] == [RESULT_BYTES_MAX]
    assert len(sent) <= MESSAGE_BYTES_MAX
    assert [entry.checkpoint for entry in session.held(hello=False)] == [bytes(1 << 20)]


def test_a_result_whose_file_cannot_be_read_fails_its_attempt_and_no_other(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "segment"
    file.write_bytes(b"whole")
    segment = Segment("segment", os.open(file, os.O_RDONLY))
    results: list[bytes | Reference] = [b"small", Reference(segment, 0, 5), Reference(segment, 0, 100)]
    leases = grant(session, 1, 2, 3)
    both = zip(leases, results, strict=True)
    session.report(1, 2, [Report(lease, ReportState.SUCCEEDED, result) for lease, result in both])
    one, two = pb.SessionRequest.FromString(request_of(frame(session))).report_batches
    assert dict(zip(one.succeeded_lease_ids, one.results, strict=True)) == {1: b"small", 2: b"whole"}
    (report,) = two.reports
    assert (report.lease_id, report.error.type, report.error.retryable) == (3, "ResultLost", True)


def test_return_all_empties_the_session_and_a_grant_without_one_is_our_bug(session: Session) -> None:
    leases = grant(session, 1, 2)
    succeed(session, leases[0])
    session.return_all_leases("stopping", 7)
    taken = frame(session)
    states = [report.state for group in taken.reports for report in group.reports]
    assert states == [ReportState.SUCCEEDED, ReportState.RETURNED]
    assert session.leases == {}
    with pytest.raises(AssertionError):
        grant(Session(SessionLimits()), 1)


@dataclass
class PeerTask:
    lease: Lease
    partials: list[bytes] = field(default_factory=list)
    settled: bool = False


class Peer:
    """A model of the master: accepts reports of live leases only, and loses reports sent just before a break."""

    def __init__(self, session: Session, rng: random.Random) -> None:
        self.session = session
        self.rng = rng
        self.tasks: dict[int, PeerTask] = {}
        self.live: set[int] = set()
        self.in_flight: list[Frame] = []
        self.next_lease_id = 1

    def grant(self) -> None:
        lease = Lease(self.next_lease_id, self.next_lease_id, 1, SPEC, b"p")
        self.next_lease_id += 1
        self.tasks[lease.lease_id] = PeerTask(lease)
        self.live.add(lease.lease_id)
        self.session.grant([lease])

    def arrive(self) -> None:
        taken = self.in_flight.pop(0)
        parts = [self._reports, self._partials]
        self.rng.shuffle(parts)  # a peer may read a frame's parts in either order
        for part in parts:
            part(taken)

    def _reports(self, taken: Frame) -> None:
        for group in taken.reports:
            for report in group.reports:
                lease_id = report.lease.lease_id
                if lease_id in self.live:
                    self.live.discard(lease_id)
                    task = self.tasks[lease_id]
                    assert not task.settled
                    task.settled = True
                    assert isinstance(report.result, bytes)
                    assert len(task.partials) == int(report.result)

    def _partials(self, taken: Frame) -> None:
        for partial in taken.partials:
            lease_id = partial.lease.lease_id
            if lease_id in self.live:
                known = self.tasks[lease_id].partials
                assert partial.index <= len(known), "a gap"
                if partial.index == len(known):
                    known.append(partial.data)

    def reconnect(self) -> None:
        listed = {entry.lease.lease_id for entry in self.session.held(hello=True)}
        lost = self.live - listed
        assert all(not self.tasks[lease_id].lease.resumable for lease_id in lost), "a lease was forgotten"
        self.live -= lost
        self.session.welcome(sorted(self.live & listed))


@pytest.mark.parametrize("seed", range(300))
def test_any_order_of_events_loses_and_repeats_nothing(seed: int) -> None:
    rng = random.Random(seed)
    session = Session(SessionLimits(partial_bytes_max=60, sent_bytes_max=1 << 20))
    peer = Peer(session, rng)
    session.welcome([])
    for _ in range(200):
        event = rng.randrange(8)
        working = list(session.leases.values())
        if event == 0 and session.connected:
            peer.grant()
        elif event == 1 and working:
            lease = rng.choice(working)
            session.report(1, 2, [Report(lease, ReportState.SUCCEEDED, b"%d" % lease.partials_made)])
        elif event in {2, 3} and working:
            session.partial(rng.choice(working), b"x" * rng.randrange(20))
        elif event in {4, 5} and session.connected and session.has_unsent():
            bytes_max = rng.choice([1, 100, FRAME_BYTES])
            taken = session.take_frame(bytes_max, 0.0)
            sizes = [g.size_bytes for g in taken.reports] + [len(p.data) + REPORT_BYTES for p in taken.partials]
            assert len(sizes) == 1 or sum(sizes) <= bytes_max
            peer.in_flight.append(taken)
        elif event == 6 and peer.in_flight:
            peer.arrive()
        elif event == 7 and rng.random() < 0.3:
            if session.connected:
                del peer.in_flight[rng.randrange(len(peer.in_flight) + 1) :]
                while peer.in_flight:
                    peer.arrive()
                session.stream_broken()
            else:
                peer.reconnect()
    if not session.connected:
        peer.reconnect()
    for lease in list(session.leases.values()):
        session.report(1, 2, [Report(lease, ReportState.SUCCEEDED, b"%d" % lease.partials_made)])
    while session.has_unsent():
        peer.in_flight.append(session.take_frame(FRAME_BYTES, 0.0))
    while peer.in_flight:
        peer.arrive()
    assert peer.live == set()
    assert (session.unsent_bytes, session.leases) == (0, {})


def test_frames_are_bounded_by_all_that_reports_take(session: Session) -> None:
    """Error texts and logs did not count: after an outage, one frame was larger than a message may be."""
    leases = grant(session, *range(3000))
    for lease in leases[::2]:
        lease.log = "\N{FULL BLOCK}" * 5000
    error = TaskError(type="E", message="m" * 8000, retryable=True, traceback="t" * 16000)
    session.stream_broken()
    session.report(1, 2, [Report(lease, ReportState.FAILED, error=error) for lease in leases])
    session.welcome([lease.lease_id for lease in leases])
    seen: list[int] = []
    while session.has_unsent():
        taken = [report for group in frame(session).reports for report in group.reports]
        texts = [r.lease.log.encode() + f"{r.error.message}{r.error.traceback}".encode() for r in taken if r.error]
        assert sum(map(len, texts)) <= FRAME_BYTES
        seen += [report.lease.lease_id for report in taken]
    assert seen == [lease.lease_id for lease in leases]


def test_logs_that_do_not_fit_into_a_hello_follow_in_heartbeats(session: Session) -> None:
    leases = grant(session, *range(3000))
    for lease in leases:
        session.log(lease, "\N{FULL BLOCK}" * 16000)
    session.stream_broken()
    listed = session.held(hello=True)
    sizes = [sum(len(entry.log.encode()) for entry in listed)]
    assert len(listed) == 3000
    while any(lease.log_unsent for lease in leases):
        sizes.append(sum(len(entry.log.encode()) for entry in session.held(hello=False)))
    assert max(sizes) <= 32 << 20
    assert sum(sizes) == sum(len(lease.log.encode()) for lease in leases)
