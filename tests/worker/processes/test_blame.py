"""Limits and charges as values: when an engine must be ended, and which leases are charged for its end."""

import signal
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from multigpu_worker.processes import load_watch
from multigpu_worker.processes.batch import EngineBatch
from multigpu_worker.processes.blame.charge import DEATHS_MAX
from multigpu_worker.processes.blame.evidence import Evidence
from multigpu_worker.processes.blame.limits import Limits, Violation
from multigpu_worker.processes.death import Death
from multigpu_worker.processes.ipc.slots import SlotState
from multigpu_worker.processes.process import EngineProcess
from multigpu_worker.session.lease import Lease, Spec
from multigpu_worker.session.session import TaskError

SECOND = 1_000_000_000
CRASHED, KILLED = -11, -9
CONTEXT_LOST = "CUDA error: an illegal memory access was encountered"


def batch(batch_id: int, ids: Iterable[int], *, one_by_one: bool, run_timeout_s: float = 0.0) -> EngineBatch:
    spec = Spec(kind="k", run_timeout_s=run_timeout_s)
    return EngineBatch(batch_id, {n: Lease(n, n, 1, spec, b"") for n in ids}, one_by_one, spec)


def state(batch_id: int, lease_id: int = 0, started_ns: int = 0, beats: int = 0) -> SlotState:
    return SlotState(batch_id=batch_id, lease_id=lease_id, started_ns=started_ns, beats=beats)


def limits(progress_timeout_s: float = 0.0, cancel_grace_s: float = 5.0) -> Limits:
    return Limits(progress_timeout_s=progress_timeout_s, cancel_grace_s=cancel_grace_s)


def by_id(batches: Iterable[EngineBatch]) -> dict[int, EngineBatch]:
    return {batch.batch_id: batch for batch in batches}


def check(made: Limits, now_s: float, slots: list[SlotState], *batches: EngineBatch, **cancelled_s: float) -> str:
    cancelled_ns = {int(name[1:]): int(instant * SECOND) for name, instant in cancelled_s.items()}
    violation = made.check(int(now_s * SECOND), slots, by_id(batches), cancelled_ns)
    return "" if violation is None else violation.error.type


def test_run_timeout_counts_from_the_beginning_of_the_lease_or_of_a_batch_that_runs_together() -> None:
    timed = batch(1, [1, 2], one_by_one=True, run_timeout_s=2)
    running = [state(1, 2, started_ns=10 * SECOND)]
    assert check(limits(), 11.9, running, timed) == ""
    assert check(limits(), 12.0, running, timed) == "RunTimeout"
    assert check(limits(), 99, [state(1, 0)], timed) == "", "between two items"
    assert check(limits(), 99, [state(0)], timed) == "", "idle"
    assert check(limits(), 99, [state(7, 2)], timed) == "", "an unknown batch"
    assert check(limits(), 99, running, batch(1, [1, 2], one_by_one=True)) == "", "no limit"
    joint = batch(1, [1, 2], one_by_one=False, run_timeout_s=2)
    assert check(limits(), 1.9, [state(1)], joint) == ""
    assert check(limits(), 2.1, [state(1)], joint) == "RunTimeout"
    joint.leases.clear()  # all settled
    assert check(limits(), 99, [state(1)], joint) == ""


def test_progress_timeout_counts_from_the_last_beat() -> None:
    made = limits(progress_timeout_s=1)
    running = batch(1, [1, 2], one_by_one=True)
    for now_s, slot in (
        (0, state(1, 1, beats=5)),
        (0.9, state(1, 1, beats=5)),
        (1.0, state(1, 1, beats=6)),
        (1.9, state(1, 1, beats=6)),
        (2.0, state(1, 2, started_ns=1, beats=6)),  # another lease
        (2.5, state(0, beats=6)),
        (3.5, state(1, 2, started_ns=1, beats=6)),  # idle meanwhile
    ):
        assert check(made, now_s, [slot], running) == ""
    assert check(made, 4.5, [state(1, 2, started_ns=1, beats=6)], running) == "NoProgress"


def test_a_pause_in_which_the_engine_is_not_read_does_not_count_as_time_without_progress() -> None:
    """The engine waits until the agent reads on: it was ended in the first check after the pause."""
    running, slots = batch(1, [1], one_by_one=True), [state(1, 1)]
    child = SimpleNamespace(ready=True, channel=SimpleNamespace(pause=lambda *, paused: paused))
    process: Any = SimpleNamespace(child=child, _limits=limits(progress_timeout_s=1))
    assert check(process._limits, 0, slots, running) == ""
    EngineProcess.pause(process, paused=True)
    EngineProcess.pause(process, paused=False)
    assert check(process._limits, 60, slots, running) == ""
    assert check(process._limits, 61, slots, running) == "NoProgress"


def test_a_hung_task_is_ended_although_its_worker_pauses_every_now_and_then() -> None:
    """Each pause let its time without progress begin again."""
    running, slots = batch(1, [1], one_by_one=True), [state(1, 1)]
    child = SimpleNamespace(ready=True, channel=SimpleNamespace(pause=lambda *, paused: paused))
    process: Any = SimpleNamespace(child=child, _limits=limits(progress_timeout_s=60))
    seen = []
    for period in range(4):
        seen += [check(process._limits, 50 * period + second, slots, running) for second in range(20)]
        EngineProcess.pause(process, paused=True)
        EngineProcess.pause(process, paused=False)
    assert seen.index("NoProgress") == 63, "60 s and what the checks miss of the pauses"


def test_time_in_which_the_worker_is_suspended_does_not_count_as_time_without_progress() -> None:
    """The engine was suspended with it, as by `docker pause`: it was ended in the first check afterwards."""
    made, running, slots = limits(progress_timeout_s=1), batch(1, [1], one_by_one=True), [state(1, 1)]
    assert check(made, 0, slots, running) == ""
    assert check(made, 60, slots, running) == ""
    assert check(made, 60.9, slots, running) == ""
    assert check(made, 61, slots, running) == "NoProgress"


@pytest.mark.parametrize("suspended_s", [30, 54, 600])
def test_a_suspension_that_is_shorter_than_the_progress_timeout_is_no_standstill_either(suspended_s: int) -> None:
    made, running, slots = limits(progress_timeout_s=60), batch(1, [1], one_by_one=True), [state(1, 1)]
    seconds = [*range(40), *range(39 + suspended_s, 80 + suspended_s)]
    assert [check(made, second, slots, running) for second in seconds].index("NoProgress") == 61


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the agent, which a test sets."""
    made = SimpleNamespace(now_ns=0)
    monkeypatch.setattr(time, "monotonic_ns", lambda: made.now_ns)
    return made


def process_of(running: EngineBatch, child: object) -> Any:
    return SimpleNamespace(
        child=child, ready=True, batches=by_id([running]), settings=SimpleNamespace(memory_bytes=0),
        inside=lambda: set(running.leases), send=lambda *_: None,
        _limits=limits(), _evidence=SimpleNamespace(violation=None), _cancelled_ns={},
    )  # fmt: skip


def test_a_worker_that_is_suspended_while_it_checks_its_engine_does_not_end_it(clock: SimpleNamespace) -> None:
    """The engine went on with other tasks. The age of the one that was seen counted up to the end of the suspension."""

    def sample() -> list[SlotState]:
        clock.now_ns += 10 * SECOND
        return [state(1, 1)]

    kills: list[str] = []
    page = SimpleNamespace(sample=sample)
    child = SimpleNamespace(ready=True, page=page, kill=lambda: kills.append("killed"))
    process = process_of(batch(1, [1, 2], one_by_one=True, run_timeout_s=2), child)
    EngineProcess.check(process, memory=False)
    assert not kills
    EngineProcess.check(process, memory=False)
    assert kills


def test_the_grace_period_of_a_cancelled_lease_begins_when_the_engine_is_told(clock: SimpleNamespace) -> None:
    """A worker that was suspended before it sent the cancellation ended the engine at once."""
    process = process_of(batch(1, [1], one_by_one=True), None)
    process.send = lambda *_: setattr(clock, "now_ns", 10 * SECOND)
    EngineProcess.cancel(process, [Lease(1, 1, 1, Spec(kind="k"), b"")])
    assert process._cancelled_ns == {1: 10 * SECOND}


def test_cancelled_leases_have_a_grace_period() -> None:
    running = batch(1, [1, 2], one_by_one=True)
    assert check(limits(), 99, [state(1, 1)], running, c2=1) == ""
    assert check(limits(), 5.9, [state(1, 1)], running, c1=1) == ""
    assert check(limits(), 6.0, [state(1, 1)], running, c1=1) == "Cancelled"
    together = batch(1, [1, 2], one_by_one=False)
    assert check(limits(), 99, [state(1)], together, c1=1) == "", "the other lease is still wanted"
    assert check(limits(), 99, [state(1)], together, c1=1, c2=97) == ""
    assert check(limits(), 99, [state(1)], together, c1=1, c2=2) == "Cancelled"


def judge(
    slots: list[SlotState],
    *batches: EngineBatch,
    violation: Violation | None = None,
    returncode: int = KILLED,
    prepared: int = 0,
    context_lost: int = 0,
) -> tuple[dict[int, str], list[Lease]]:
    """The charged leases with their errors, and the leases that go on. `context_lost`: the lease that reported it."""
    evidence = Evidence(lambda _: False, 0)
    evidence.violation = violation
    if context_lost:
        failure = (context_lost, "RuntimeError", CONTEXT_LOST, True, "")
        assert evidence.keep_back([failure], one_by_one=True, reported_ns=SECOND) == []
    judged = evidence.judge(Death(returncode=returncode, slots=slots, prepared=prepared), by_id(batches))
    errors = {r.lease.lease_id: r.error.type for r in judged.reports if r.error is not None}
    return errors, judged.again


def ids(leases: Iterable[Lease]) -> list[int]:
    return [lease.lease_id for lease in leases]


def charged(slots: list[SlotState], *batches: EngineBatch, **more: int) -> tuple[list[int], list[int]]:
    failed, again = judge(slots, *batches, **more)  # type: ignore[arg-type]
    return list(failed), ids(again)


@pytest.mark.parametrize(("slot", "failed"), [(state(1, 2), [2]), (state(1, 0), []), (state(1, 9), []), (state(0), [])])
def test_only_the_lease_that_ran_is_charged(slot: SlotState, failed: list[int]) -> None:
    one, two = batch(1, [1, 2, 3], one_by_one=True), batch(2, [4, 5], one_by_one=False)
    assert charged([slot], one, two) == (failed, [n for n in (1, 2, 3, 4, 5) if n not in failed])


def test_a_violation_spares_the_other_slots_and_a_batch_that_runs_together_is_found_again() -> None:
    one, two = batch(1, [1, 2], one_by_one=True), batch(2, [3, 4], one_by_one=True)
    error = TaskError(type="RunTimeout", message="", retryable=True)
    violation = Violation(slots=frozenset([(2, 3)]), error=error)
    failed, again = judge([state(1, 1), state(2, 3)], one, two, violation=violation)
    assert (failed, ids(again)) == ({3: "RunTimeout"}, [1, 2, 4])
    together = batch(1, [1, 2, 3, 4], one_by_one=False, run_timeout_s=1)
    seen = limits().check(2 * SECOND, [state(1, 1)], {1: together}, {})
    assert seen is not None
    # The engine went on to another item before it was dead.
    failed, again = judge([state(1, 3)], together, violation=seen)
    assert failed == {}
    assert [lease.batch_size_max for lease in again] == [2] * 4


def test_of_several_slots_and_a_batch_in_preparation_none_is_charged_before_it_ran_alone() -> None:
    one, two, three = (batch(n, [n], one_by_one=True) for n in (1, 2, 3))
    slots = [state(1, 1), state(2, 2)]
    assert charged(slots, one, two, three) == ([], [1, 2, 3])
    (first,), (second,), (third,) = (list(each.leases.values()) for each in (one, two, three))
    assert (first.suspect, second.suspect, third.suspect) == (True, True, False)
    assert charged([state(2, 2)], two, one) == ([2], [1])
    ran, came, waited = (batch(n, [n], one_by_one=True) for n in (1, 2, 3))
    assert charged([state(1, 1)], ran, came, waited, prepared=2) == ([], [1, 2, 3])
    assert [each.suspect for b in (ran, came, waited) for each in b.leases.values()] == [True, True, False]
    assert charged([state(0)], came, prepared=2) == ([2], [])
    assert charged([state(1, 1)], ran, came, prepared=7) == ([1], [2]), "an unknown batch"


@pytest.mark.parametrize("looks", [(0.0, 0.9, 1.0), (0.0, 0.1, 1.05)], ids=["at once", "one after the other"])
def test_slots_that_stop_together_are_suspect_together(looks: tuple[float, ...]) -> None:
    made = limits(progress_timeout_s=1)
    batches = [batch(n, [n], one_by_one=True) for n in (1, 2, 3)]
    violation = None
    for now_s in looks:
        assert violation is None
        late = int(now_s > 0) if looks[1] < 0.5 else 0
        slots = [state(1, 1), state(2, 2, beats=late), state(3, 3, beats=int(now_s * 100))]
        violation = made.check(int(now_s * SECOND), slots, by_id(batches), {})
    assert violation is not None
    assert violation.slots == {(1, 1), (2, 2)} and violation.error.type == "NoProgress"
    failed, again = judge(slots, *batches, violation=violation)
    assert failed == {}
    assert [(lease.lease_id, lease.suspect) for lease in again] == [(1, True), (2, True), (3, False)]


def test_a_lease_that_reports_a_lost_context_is_suspect_with_those_beside_it_and_of_the_next_batch() -> None:
    one, two = (batch(n, [n, n + 10], one_by_one=True) for n in (1, 2))
    failed, again = judge([state(1, 0), state(2, 2)], one, two, context_lost=1)
    assert failed == {}
    assert [lease.lease_id for lease in again if lease.suspect] == [1, 2]
    failed, again = judge([state(0), state(0)], one, two, context_lost=1)
    assert (list(failed), len(again)) == ([1], 3)
    one, two = (batch(n, [n], one_by_one=False) for n in (1, 2))
    failed, again = judge([state(1)], one, two, context_lost=1)
    assert failed == {}
    assert [lease.lease_id for lease in again if lease.suspect] == [1, 2]
    assert list(judge([state(1)], one, context_lost=1)[0]) == [1]


def test_a_lease_that_mps_rejected_is_charged_only_after_many_deaths() -> None:
    evidence, one = Evidence(lambda _: False, 0), batch(1, [1], one_by_one=True)
    for nth in range(DEATHS_MAX):
        failure = (1, "RuntimeError", "CUDA error: the MPS server is not ready to accept new requests", True, "")
        assert evidence.keep_back([failure], one_by_one=True, reported_ns=SECOND) == []
        judged = evidence.judge(Death(returncode=KILLED, slots=[state(1, 1)]), {1: one})
        assert bool(judged.reports) is (nth == DEATHS_MAX - 1)


def test_the_only_lease_of_a_crash_is_charged_and_others_outside_a_run_are_up_to_a_limit_not() -> None:
    assert charged([state(1)], batch(1, [1], one_by_one=True), returncode=CRASHED) == ([1], [])
    assert charged([state(1)], batch(1, [1], one_by_one=True), returncode=KILLED) == ([], [1])
    two = [batch(n, [n], one_by_one=True) for n in (1, 2)]
    failed, again = judge([state(1)], *two, returncode=CRASHED)
    assert failed == {}
    assert all(lease.suspect for lease in again), "each goes on alone"
    held = batch(1, [1, 2], one_by_one=False)
    for _ in range(DEATHS_MAX - 1):
        assert charged([state(0)], held) == ([], [1, 2])
    assert judge([state(0)], held) == ({1: "EngineDied", 2: "EngineDied"}, [])


def test_a_batch_is_halved_until_the_culprit_is_alone() -> None:
    culprit = 77
    waiting = [batch(1, range(256), one_by_one=False).leases]
    deaths = survivors = 0
    found: list[int] = []
    while waiting:
        leases = waiting.pop(0)
        if culprit not in leases:
            survivors += len(leases)
            continue
        deaths += 1
        one = EngineBatch(deaths, dict(leases), one_by_one=False, spec=Spec(kind="k"))
        failed, again = judge([state(deaths)], one)
        found += failed
        while again:
            size = again[0].batch_size_max
            waiting.append({lease.lease_id: lease for lease in again[:size]})
            again = again[size:]
    assert (found, survivors, deaths) == ([culprit], 255, 9)


def test_a_process_killed_by_a_real_time_signal_is_described() -> None:
    """Most of these signals have no name: the worker ended with a ValueError."""
    for number in range(1, signal.NSIG):
        assert Death(returncode=-number, slots=[]).summary.startswith("was killed by ")
    assert Death(returncode=-(signal.SIGRTMIN + 2), slots=[]).summary == f"was killed by signal {signal.SIGRTMIN + 2}"


def test_an_engine_that_is_replaced_while_none_runs_excuses_no_later_death() -> None:
    evidence = Evidence(lambda _: False, 0)
    process: Any = SimpleNamespace(child=None, _evidence=evidence, kill=lambda: None)
    EngineProcess.end_uncharged(process)
    assert evidence.violation is None
    process.child = object()
    EngineProcess.end_uncharged(process)
    assert evidence.violation is not None


def test_a_process_that_is_unloaded_during_a_self_test_says_so() -> None:
    """The device was judged unusable."""
    causes: list[str] = []
    dispatcher = SimpleNamespace(engine_died=lambda *arguments: causes.append(arguments[-1]))
    process: Any = SimpleNamespace(
        batches={}, takes_no_batches=True, model="m", occupied=0, slots=1, _evidence=Evidence(lambda _: False, 0),
        _clear=lambda: None, _limits=SimpleNamespace(reset=lambda: None),
        _callbacks=SimpleNamespace(dispatcher=dispatcher),
    )  # fmt: skip
    EngineProcess._died(process, Death(returncode=0, slots=[]))
    assert causes == ["it was unloaded"]


def test_a_load_that_was_suspended_with_the_worker_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_watch, "_cpu_ticks", lambda _: 7)
    monkeypatch.setattr(load_watch, "members", lambda pid: [(pid, "S")])
    for suspended_s in (30, 54, 600):
        watch = load_watch.LoadWatch(60.0, 5.0)
        seconds = [*range(0, 41, 5), *range(40 + suspended_s, 81 + suspended_s, 5)]
        assert [watch.stuck([1], float(second)) for second in seconds].index(True) == 14, suspended_s
