"""The bookkeeping of a Run stream, against a model master that loses, repeats, rejects and reorders. No I/O."""

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from multigpu._transport.call import Answer, Call
from multigpu._transport.payloads import LARGE_BYTES, Directory, read_file
from multigpu._transport.run_state import FRAME_BYTES_MAX, FRAME_TASKS_MAX, RunState
from multigpu._transport.window import Window
from multigpu.errors import ALREADY_EXISTS, NOT_FOUND, AlreadyExistsError, ClientClosedError, InvalidTaskError
from multigpu.outcome import Outcome
from multigpu.v1 import task_pb2, task_service_pb2

from tests.client.scripted_master import inputs_of

SPECS = [task_pb2.TaskSpec(kind="a"), task_pb2.TaskSpec(kind="b")]


class Recorded(Call):
    def __init__(self, payload: bytes, request_id: str, spec: task_pb2.TaskSpec = SPECS[0]) -> None:
        super().__init__(spec, payload, request_id, None)
        self.answers: list[Answer] = []
        self.withdrawn = False
        self.parts: list[bytes] = []

    def settle(self, answer: Answer) -> None:
        self.answers.append(answer)

    def receive_partial(self, data: bytes, content_type: str) -> None:
        self.parts.append(data)


def started(state: RunState, window: Window, *calls: Call) -> None:
    assert window.try_admit(len(calls), sum(call.nbytes for call in calls))
    state.start(calls)


def parsed(frame: bytes | None) -> task_service_pb2.RunRequest:
    assert frame is not None
    return task_service_pb2.RunRequest.FromString(frame)


def ids(frame: bytes | None) -> list[str]:
    return [task.request_id for batch in parsed(frame).batches for task in inputs_of(batch)]


def succeeded(*request_ids: str) -> task_service_pb2.RunResponse:
    outcomes = [task_pb2.Outcome(request_id=i, state=task_pb2.OUTCOME_STATE_SUCCEEDED) for i in request_ids]
    return task_service_pb2.RunResponse(outcomes=outcomes)


@pytest.fixture
def window() -> Window:
    return Window(10_000, 1 << 30)


@pytest.fixture
def state(window: Window) -> RunState:
    return RunState(window)


def test_a_frame_groups_neighbours_of_one_spec(state: RunState, window: Window) -> None:
    started(state, window, *(Recorded(b"", str(i), SPECS[i // 3 % 2]) for i in range(9)))
    frame = parsed(state.next_frame())
    assert [(batch.spec.kind, len(inputs_of(batch))) for batch in frame.batches] == [("a", 3), ("b", 3), ("a", 3)]
    assert state.next_frame() is None


def test_tasks_keep_their_order_and_fields_whatever_their_size(state: RunState, window: Window) -> None:
    own: dict[str, Any] = {"units": 3, "partition_key": "k"}
    sizes = [(10, None), (200_000, None), (10, own), (200_000, own), (11, own), (12, None), (0, own)]
    calls = [Recorded(bytes([n]) * size, f"{n}", SPECS[0]) for n, (size, _) in enumerate(sizes)]
    for call, (_, fields) in zip(calls, sizes, strict=True):
        call.own = fields
    state.offered(None)
    started(state, window, *calls)
    tasks = [task for batch in parsed(state.next_frame()).batches for task in inputs_of(batch)]
    assert [(task.request_id, task.payload, task.units, task.partition_key) for task in tasks] == [
        (call.request_id, call.payload, 3 if call.own else 0, "k" if call.own else "") for call in calls
    ]


def test_frames_are_bounded(state: RunState, window: Window) -> None:
    state.offered(None)
    started(state, window, *(Recorded(b"", f"s{i}") for i in range(FRAME_TASKS_MAX + 1)))
    assert [len(ids(state.next_frame())) for _ in range(2)] == [FRAME_TASKS_MAX, 1]
    started(state, window, *(Recorded(bytes(300_000), f"m{i}") for i in range(4)))
    assert [len(ids(state.next_frame())) for _ in range(2)] == [3, 1]
    started(state, window, *(Recorded(bytes(size), f"l{size}") for size in (10, 2 * FRAME_BYTES_MAX, 11)))
    assert [ids(state.next_frame()) for _ in range(3)] == [["l10"], [f"l{2 * FRAME_BYTES_MAX}"], ["l11"]]


def test_a_new_stream_sends_all_unsettled_calls_in_order(state: RunState, window: Window) -> None:
    calls = [Recorded(b"", str(i)) for i in range(5)]
    started(state, window, *calls[:4])
    state.next_frame()
    state.receive(succeeded("1"), 10)
    started(state, window, calls[4])
    state.stream_opened()
    assert ids(state.next_frame()) == ["0", "2", "3", "4"]


def test_the_delay_of_a_rejection_holds_on_a_new_stream(state: RunState, window: Window) -> None:
    call, left = Recorded(b"", "x"), Recorded(b"", "left")
    started(state, window, call, left)
    state.next_frame()
    response = task_service_pb2.RunResponse()
    for request_id in ("x", "left"):
        response.rejected.add(request_id=request_id, code=8, message="full").retry_delay.FromMilliseconds(1500)
    later = state.receive(response, 10)
    assert later == {1.5: [call, left]}
    state.withdraw(left)
    state.stream_opened()
    frame = state.next_frame()
    assert frame is not None
    assert ids(frame) == []
    state.retry(later[1.5])
    assert ids(state.next_frame()) == ["x"]


def test_a_new_stream_sends_the_number_of_partial_outputs_received(state: RunState, window: Window) -> None:
    call = Recorded(b"", "x")
    started(state, window, call)
    state.next_frame()
    for index in (0, 1, 1, 0, 3):  # repeats, and a gap
        response = task_service_pb2.RunResponse()
        response.partials.add(request_id="x", index=index, data=b"%d" % index)
        state.receive(response, 10)
    assert call.parts == [b"0", b"1"]
    state.stream_opened()
    frame = parsed(state.next_frame())
    assert frame.batches[0].inputs[0].partials_received == 2


class Follower(Recorded):
    follows = streams = True


def test_each_follower_of_a_task_has_all_partial_outputs(state: RunState, window: Window) -> None:
    first, second, third = (Follower(b"", "a") for _ in range(3))

    def receive(begin: int, end: int) -> None:
        parts = [task_service_pb2.Partial(request_id="a", index=n, data=b"%d" % n) for n in range(begin, end)]
        state.receive(task_service_pb2.RunResponse(partials=parts), 0)

    def follow(call: Follower) -> None:
        started(state, window, call)
        frame = parsed(state.next_frame())
        assert frame.follow_request_ids == ["a"]

    follow(first)
    receive(0, 2)
    follow(second)
    receive(0, 3)
    assert first.parts == second.parts == [b"0", b"1", b"2"]
    follow(third)
    state.withdraw(first)
    frame = parsed(state.next_frame())  # the second takes its place
    assert frame.follow_request_ids == ["a"]
    assert not frame.cancel_request_ids
    receive(0, 4)
    assert second.parts == third.parts == [b"0", b"1", b"2", b"3"]
    state.receive(succeeded("a"), 1)
    assert [len(call.answers) for call in (first, second, third)] == [0, 1, 1]
    assert second.done
    assert third.done
    assert state.idle
    assert (window.tasks, window.bytes) == (0, 0)


def rejected(request_id: str, code: int) -> task_service_pb2.RunResponse:
    rejection = task_service_pb2.Rejection(request_id=request_id, code=code, message="rejected")
    return task_service_pb2.RunResponse(rejected=[rejection])


def follower_and_run(state: RunState, window: Window) -> tuple[Follower, Recorded]:
    follower, run = Follower(b"", "a"), Recorded(b"other", "a")
    started(state, window, follower)
    assert state.next_frame() is not None
    started(state, window, run)
    assert state.next_frame() is None
    return follower, run


def test_a_task_does_not_take_the_outcome_of_one_that_is_followed(state: RunState, window: Window) -> None:
    """Whether it is the same task, only the master can tell."""
    follower, run = follower_and_run(state, window)
    partials = [task_service_pb2.Partial(request_id="a", index=0, data=b"part")]
    state.receive(task_service_pb2.RunResponse(partials=partials), 0)
    state.receive(succeeded("a"), 1)
    assert (len(follower.answers), follower.parts) == (1, [b"part"])
    assert (run.answers, run.parts) == ([], [])
    assert ids(state.next_frame()) == ["a"]
    state.receive(rejected("a", ALREADY_EXISTS), 1)
    assert [type(answer) for answer in run.answers] == [AlreadyExistsError]
    assert (window.tasks, window.bytes) == (0, 0)


def test_a_task_is_submitted_if_there_is_none_to_follow(state: RunState, window: Window) -> None:
    follower, run = follower_and_run(state, window)
    state.receive(rejected("a", NOT_FOUND), 1)
    assert len(follower.answers) == 1
    assert ids(state.next_frame()) == ["a"]
    state.receive(succeeded("a"), 1)
    assert [isinstance(answer, Outcome) for answer in run.answers] == [True]
    assert (window.tasks, window.bytes) == (0, 0)


def test_a_task_behind_a_follower_that_leaves_was_never_sent(state: RunState, window: Window) -> None:
    follower, run = follower_and_run(state, window)
    state.withdraw(follower)
    assert not run.sent
    state.withdraw(run)
    assert state.next_frame() is None, "it must not cancel the task that was followed"
    assert state.idle
    assert (window.tasks, window.bytes) == (0, 0)


def test_the_rejection_of_a_task_concerns_no_follower(state: RunState, window: Window) -> None:
    run, twin, follower = Recorded(b"other", "a"), Recorded(b"other", "a"), Follower(b"", "a")
    started(state, window, run)
    assert ids(state.next_frame()) == ["a"]
    started(state, window, twin, follower)
    state.receive(rejected("a", ALREADY_EXISTS), 1)
    assert [len(call.answers) for call in (run, twin, follower)] == [1, 1, 0]
    frame = parsed(state.next_frame())
    assert set(frame.follow_request_ids) == {"a"}
    state.receive(succeeded("a"), 1)
    assert [isinstance(answer, Outcome) for answer in follower.answers] == [True]
    assert (window.tasks, window.bytes) == (0, 0)


def test_fail_all_gives_each_call_its_own_error(state: RunState, window: Window) -> None:
    calls = [Recorded(b"", str(i)) for i in range(3)]
    twin = Recorded(b"", "0")
    started(state, window, *calls, twin)
    state.fail_all(lambda: ClientClosedError("over"))
    answers = [answer for call in (*calls, twin) for answer in call.answers]
    assert len(answers) == len({id(answer) for answer in answers}) == 4
    assert state.idle
    assert (window.tasks, window.bytes) == (0, 0)


def test_a_large_payload_after_a_small_one_waits_for_the_offer_of_its_stream(
    state: RunState, window: Window, tmp_path: Path
) -> None:
    small, large, last = Recorded(b"", "small"), Recorded(bytes(2 * LARGE_BYTES), "large"), Recorded(b"", "last")
    state.stream_opened()
    state.offered(Directory(tmp_path, b"the first master"))
    started(state, window, small, large, last)
    frame = parsed(state.next_frame())
    assert [bool(task.payload_place.segment) for batch in frame.batches for task in inputs_of(batch)] == [0, 1, 0]
    state.stream_opened()
    assert ids(state.next_frame()) == ["small"]  # the master may have another directory by now, or none
    assert state.waits_for_offer
    state.offered(None)
    data = state.next_frame()
    assert ids(data) == ["large", "last"]
    frame = parsed(data)
    assert not frame.batches[0].inputs
    assert frame.batches[0].payloads[0] == large.payload


def test_a_result_that_was_taken_is_reported_alone_only_when_asked(
    state: RunState, window: Window, tmp_path: Path
) -> None:
    (tmp_path / "segment").write_bytes(b"result")
    state.offered(Directory(tmp_path, b"the key"))
    call = Recorded(b"", "x")
    started(state, window, call)
    state.next_frame()
    response = succeeded("x")
    place = response.outcomes[0].result_place
    place.segment, place.size = "segment", 6
    state.receive(response, 10)
    assert state.next_frame() is None
    frame = parsed(state.next_frame(report=True))
    assert (frame.results_taken, frame.payload_key) == (1, b"")
    assert state.next_frame(report=True) is None


class Model:
    """A model of a master: it knows tasks by request_id, settles each once, answers on the live stream only, and
    takes references only on a stream that has shown the key of its present life.
    """

    def __init__(self, dice: random.Random, folder: Path) -> None:
        self.dice = dice
        self.folder = folder
        self.outcomes: dict[str, task_pb2.Outcome] = {}
        self.attached: list[str] = []
        self.withdrawn: list[str] = []
        self.rejected: list[str] = []
        self.payloads: dict[str, set[bytes]] = {}
        self.key = b"0"
        self.shown = False
        self.segments: dict[str, bytes] = {}  # the life of the master that each was first seen in

    def withdraw(self, request_id: str) -> None:
        """Ends a task that has not ended, and forgets it; answers the cancellation in any case."""
        if request_id in self.outcomes or request_id not in self.attached:
            self.rejected.append(request_id)
            return
        self.attached.remove(request_id)
        self.withdrawn.append(request_id)

    def take(self, data: bytes) -> None:
        frame = parsed(data)
        if frame.payload_key:
            assert frame.payload_key == self.key
            self.shown = True
        self.attached += ids(data)
        for task in (task for batch in frame.batches for task in inputs_of(batch)):
            payload, at = task.payload, task.payload_place
            if task.HasField("payload_place"):
                assert self.shown, "references are for clients that share the directory of this life of the master"
                assert self.segments.setdefault(at.segment, self.key) == self.key
                payload = read_file(self.folder / at.segment, at.offset, at.size)
            assert payload in self.payloads[task.request_id]
        for request_id in frame.cancel_request_ids:
            self.withdraw(request_id)

    def answer(self) -> task_service_pb2.RunResponse:
        dice = self.dice
        response = task_service_pb2.RunResponse()
        for request_id in self.withdrawn:
            response.outcomes.add(
                request_id=request_id,
                state=task_pb2.OUTCOME_STATE_CANCELLED,
                error=task_pb2.TaskError(type="Withdrawn"),
            )
        for request_id in self.rejected:
            response.rejected.add(request_id=request_id, code=5, message="it has ended")
        self.withdrawn, self.rejected = [], []
        dice.shuffle(self.attached)
        for _ in range(min(dice.randrange(6), len(self.attached))):
            request_id = self.attached.pop()
            chance = dice.random()
            if request_id not in self.outcomes and chance < 0.1:
                rejection = response.rejected.add(request_id=request_id, code=8, message="full")
                rejection.retry_delay.FromMilliseconds(10)
            elif request_id not in self.outcomes and chance < 0.15:
                response.rejected.add(request_id=request_id, code=3, message="bad")
            else:
                outcome = task_pb2.Outcome(request_id=request_id, state=task_pb2.OUTCOME_STATE_SUCCEEDED)
                outcome = self.outcomes.setdefault(request_id, outcome)
                response.outcomes.extend([outcome] * dice.choice((1, 1, 2)))
        return response


@pytest.mark.parametrize("block", range(4))
def test_each_call_is_answered_once(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        run_seed(seed)


def run_seed(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_in(Path(folder), seed)


def run_in(folder: Path, seed: int) -> None:
    dice = random.Random(seed)
    window = Window(1000, 1 << 30)
    state = RunState(window)
    model = Model(dice, folder)
    offered = False
    calls: list[Recorded] = []
    later: list[Call] = []
    withdrawn: set[int] = set()

    def step(what: float) -> None:
        nonlocal later, offered
        if not offered and dice.random() < 0.3:
            offered = True
            state.offered(Directory(folder, model.key) if dice.random() < 0.7 else None)
        if what < 0.3:
            frame = state.next_frame()
            if frame is not None and dice.random() < 0.9:  # else it was lost with its stream
                model.take(frame)
            elif frame is not None:
                reopen()
        elif what < 0.6:
            for waiting in state.receive(model.answer(), 100).values():
                later += waiting
        elif what < 0.7:
            state.retry(later)
            later = []
        elif what < 0.75:
            reopen()
        elif what < 0.8 and calls:
            call = dice.choice(calls)
            if not call.answers:
                withdrawn.add(id(call))
                state.withdraw(call)

    def reopen() -> None:
        nonlocal offered
        for answers in (model.attached, model.withdrawn, model.rejected):
            answers.clear()
        model.shown = offered = False
        if dice.random() < 0.3:
            model.key += b"+"
        state.stream_opened()

    for _ in range(120):
        step(dice.random())
        if dice.random() < 0.4:
            name = f"{len(calls)}" if dice.random() < 0.8 or not calls else dice.choice(calls).request_id
            size = dice.randrange(50) + LARGE_BYTES * (dice.random() < 0.1)
            call = Recorded(b"x" * size, name, dice.choice(SPECS))
            calls.append(call)
            model.payloads.setdefault(name, set()).add(call.payload)
            started(state, window, call)
    for _ in range(2000):  # no more calls: everything must come to an end
        step(dice.choice((0.1, 0.5, 0.65)))
        if state.idle and not later:
            break
    check_answers(calls, withdrawn, f"seed {seed}")
    assert (window.tasks, window.bytes) == (0, 0), f"seed {seed}"
    assert state.idle, f"seed {seed}"


def check_answers(calls: list[Recorded], withdrawn: set[int], seed: str) -> None:
    for call in calls:
        expected = 0 if id(call) in withdrawn else 1
        assert len(call.answers) == expected, f"{seed}: {call.request_id} has {call.answers}"
        for answer in call.answers:
            assert isinstance(answer, AlreadyExistsError | InvalidTaskError | Outcome)
            if isinstance(answer, Outcome):
                assert answer.request_id == call.request_id
                assert answer.succeeded, f"{seed}: {call.request_id} has the end of a withdrawn call"
