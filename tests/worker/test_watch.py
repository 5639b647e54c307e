"""The watch as values: when an engine must be ended, and who is to blame."""

from multigpu_worker.processes.ipc import SlotState
from multigpu_worker.processes.watch import (
    CLEARING_OUTPUTS,
    DEATHS_MAX,
    EngineBatch,
    Verdict,
    Watch,
    blame,
    clears,
    condemn,
)
from multigpu_worker.session.session import Lease, Spec, TaskError

DIED = TaskError(type="EngineDied", message="it died", retryable=True)
SECOND = 1_000_000_000


def batch(batch_id: int, ids: list[int], *, one_by_one: bool, run_timeout_s: float = 0.0) -> EngineBatch:
    spec = Spec(kind="k", run_timeout_s=run_timeout_s)
    return EngineBatch(batch_id, {n: Lease(n, n, 1, spec, b"") for n in ids}, one_by_one, spec)


def state(batch_id: int, lease_id: int = 0, started_ns: int = 0, beats: int = 0) -> SlotState:
    return SlotState(batch_id=batch_id, lease_id=lease_id, started_ns=started_ns, beats=beats)


def watch(progress_timeout_s: float = 0.0, cancel_grace_s: float = 5.0) -> Watch:
    return Watch(progress_timeout_s=progress_timeout_s, cancel_grace_s=cancel_grace_s)


def check(made: Watch, now_s: float, slots: list[SlotState], *batches: EngineBatch, **cancelled_s: float) -> str | None:
    cancelled_ns = {int(name[1:]): int(instant * SECOND) for name, instant in cancelled_s.items()}
    verdict = made.check(int(now_s * SECOND), slots, {b.batch_id: b for b in batches}, cancelled_ns)
    return None if verdict is None else verdict.error.type


def test_run_timeout_counts_from_the_beginning_of_the_lease() -> None:
    timed = batch(1, [1, 2], one_by_one=True, run_timeout_s=2)
    running = [state(1, 2, started_ns=10 * SECOND)]
    assert check(watch(), 11.9, running, timed) is None
    assert check(watch(), 12.0, running, timed) == "RunTimeout"
    assert check(watch(), 99, [state(1, 0)], timed) is None  # between two items
    assert check(watch(), 99, [state(0)], timed) is None  # idle
    assert check(watch(), 99, [state(7, 2)], timed) is None  # a batch that we don't know any more
    assert check(watch(), 99, running, batch(1, [1, 2], one_by_one=True)) is None  # no limit


def test_a_batch_that_runs_together_has_one_clock() -> None:
    timed = batch(1, [1, 2], one_by_one=False, run_timeout_s=2)
    assert check(watch(), 1.9, [state(1)], timed) is None
    assert check(watch(), 2.1, [state(1)], timed) == "RunTimeout"
    timed.leases.clear()  # all settled
    assert check(watch(), 99, [state(1)], timed) is None


def test_progress() -> None:
    made = watch(progress_timeout_s=1)
    running = batch(1, [1, 2], one_by_one=True)
    assert check(made, 0, [state(1, 1, beats=5)], running) is None
    assert check(made, 0.9, [state(1, 1, beats=5)], running) is None
    assert check(made, 1.0, [state(1, 1, beats=6)], running) is None
    assert check(made, 1.9, [state(1, 1, beats=6)], running) is None
    assert check(made, 2.0, [state(1, 2, started_ns=1, beats=6)], running) is None  # another lease
    assert check(made, 2.5, [state(0, beats=6)], running) is None
    assert check(made, 3.5, [state(1, 2, started_ns=1, beats=6)], running) is None  # idle meanwhile: anew
    assert check(made, 4.5, [state(1, 2, started_ns=1, beats=6)], running) == "NoProgress"


def test_cancelled_leases_get_their_grace() -> None:
    running = batch(1, [1, 2], one_by_one=True)
    assert check(watch(), 99, [state(1, 1)], running, c2=1) is None
    assert check(watch(), 5.9, [state(1, 1)], running, c1=1) is None
    assert check(watch(), 6.0, [state(1, 1)], running, c1=1) == "Cancelled"
    together = batch(1, [1, 2], one_by_one=False)
    assert check(watch(), 99, [state(1)], together, c1=1) is None  # somebody still wants the rest
    assert check(watch(), 99, [state(1)], together, c1=1, c2=97) is None
    assert check(watch(), 99, [state(1)], together, c1=1, c2=2) == "Cancelled"


def blamed(
    slots: list[SlotState], *batches: EngineBatch, verdict: Verdict | None = None
) -> tuple[dict[int, str], list[int]]:
    failed, again = blame(slots, {b.batch_id: b for b in batches}, verdict, DIED)
    return {lease.lease_id: error.type for lease, error in failed}, [lease.lease_id for lease in again]


def test_the_lease_that_ran_is_to_blame_and_no_other() -> None:
    one, two = batch(1, [1, 2, 3], one_by_one=True), batch(2, [4, 5], one_by_one=False)
    assert blamed([state(1, 2)], one, two) == ({2: "EngineDied"}, [1, 3, 4, 5])
    assert blamed([state(1, 0)], one, two) == ({}, [1, 2, 3, 4, 5])
    assert blamed([state(1, 9)], one, two) == ({}, [1, 2, 3, 4, 5])  # settled already
    assert blamed([state(0)], one, two) == ({}, [1, 2, 3, 4, 5])


def test_a_verdict_spares_the_other_slots() -> None:
    one, two = batch(1, [1, 2], one_by_one=True), batch(2, [3, 4], one_by_one=True)
    slots = [state(1, 1), state(2, 3)]
    error = TaskError(type="RunTimeout", message="", retryable=True)
    verdict = Verdict(accused=frozenset([(2, 3)]), error=error)
    assert blamed(slots, one, two, verdict=verdict) == ({3: "RunTimeout"}, [1, 2, 4])


def test_of_several_slots_none_is_charged_before_it_ran_alone() -> None:
    one, two, three = (batch(n, [n], one_by_one=True) for n in (1, 2, 3))
    slots = [state(1, 1), state(2, 2)]
    assert blamed(slots, one, two, three) == ({}, [1, 2, 3])
    (first,), (second,), (third,) = (list(each.leases.values()) for each in (one, two, three))
    assert (first.suspect, second.suspect, third.suspect) == (True, True, False)
    # The first has gone on since: the second is the one that is left, and goes first.
    first.partials_made = CLEARING_OUTPUTS
    assert clears(first) and not first.suspect and not clears(second)
    assert blamed(slots, one, two) == ({}, [2, 1])
    assert second.suspect and not first.suspect
    assert blamed([state(2, 2)], two, one) == ({2: "EngineDied"}, [1])
    # Twice a suspect, it stays one.
    second.partials_made = 100
    assert not clears(second)
    # All of them cleared: all of them suspects again.
    third.cleared = True
    assert blamed([state(1, 1), state(3, 3)], one, three) == ({}, [1, 3])
    assert first.suspect and third.suspect and not clears(first)


def test_a_batch_that_was_being_prepared_is_accused_with_those_that_ran() -> None:
    def one_died(*leases: Lease, prepared: int, slots: list[SlotState]) -> tuple[list[int], list[int]]:
        batches = {n: EngineBatch(n, {lease.lease_id: lease}, True, lease.spec) for n, lease in enumerate(leases, 1)}
        failed, again = blame(slots, batches, None, DIED, prepared)
        return [lease.lease_id for lease, _ in failed], [lease.lease_id for lease in again]

    ran, came, waited = (Lease(n, n, 1, Spec(kind="k"), b"") for n in (1, 2, 3))
    ran.cleared = True
    assert one_died(ran, came, waited, prepared=2, slots=[state(1, 1)]) == ([], [2, 1, 3])
    assert (ran.suspect, came.suspect, waited.suspect) == (False, True, False)
    assert one_died(came, prepared=1, slots=[state(0)]) == ([2], [])
    # A batch that we don't know any more, or none: the one that ran it was.
    assert one_died(ran, came, prepared=7, slots=[state(1, 1)]) == ([1], [2])


def test_what_is_held_up_together_is_accused_together() -> None:
    made = watch(progress_timeout_s=1)
    batches = {n: batch(n, [n], one_by_one=True) for n in (1, 2, 3)}
    for now_s in (0.0, 0.9, 1.0):
        slots = [state(1, 1), state(2, 2), state(3, 3, beats=int(now_s * 10))]
        verdict = made.check(int(now_s * SECOND), slots, batches, {})
        assert (verdict is None) == (now_s < 1)
    assert verdict is not None
    assert verdict.accused == {(1, 1), (2, 2)} and verdict.error.type == "NoProgress"
    failed, again = blame(slots, batches, verdict, DIED)
    assert failed == []
    assert [(lease.lease_id, lease.suspect) for lease in again] == [(1, True), (2, True), (3, False)]
    # One that was seen to stop a little later than the one whose time is over is no less suspect.
    made = watch(progress_timeout_s=1)
    for now_s, beats in ((0.0, 0), (0.1, 1), (1.05, 1)):
        slots = [state(1, 1), state(2, 2, beats=beats)]
        verdict = made.check(int(now_s * SECOND), slots, {n: batches[n] for n in (1, 2)}, {})
    assert verdict is not None and verdict.accused == {(1, 1), (2, 2)}


def test_whoever_says_that_the_context_is_lost_is_a_suspect_with_those_that_ran_beside() -> None:
    batches = {n: batch(n, [n, n + 10], one_by_one=True) for n in (1, 2)}
    failed, again = condemn([state(1, 0), state(2, 2)], batches, {1: DIED})
    assert failed == []
    assert [lease.lease_id for lease in again if lease.suspect] == [1, 2]
    failed, again = condemn([state(0), state(0)], batches, {1: DIED})
    assert [lease.lease_id for lease, _ in failed] == [1]
    assert len(again) == 3


def test_work_of_the_next_batch_may_have_begun_when_the_context_is_lost() -> None:
    batches = {n: batch(n, [n], one_by_one=False) for n in (1, 2)}
    failed, again = condemn([state(1)], batches, {1: DIED})
    assert failed == []
    assert [lease.lease_id for lease in again if lease.suspect] == [1, 2]
    failed, again = condemn([state(1)], {1: batches[1]}, {1: DIED})
    assert [lease.lease_id for lease, _ in failed] == [1]


def test_the_only_task_of_an_engine_that_ends_by_itself_is_charged() -> None:
    one = {1: batch(1, [1], one_by_one=True)}
    failed, _ = blame([state(1)], one, None, DIED, by_itself=True)
    assert [lease.lease_id for lease, _ in failed] == [1]
    assert blame([state(1)], one, None, DIED, by_itself=False)[0] == []
    two = {n: batch(n, [n], one_by_one=True) for n in (1, 2)}
    failed, again = blame([state(1)], two, None, DIED, by_itself=True)
    assert failed == []
    assert all(lease.suspect for lease in again), "each goes on alone"


def test_a_batch_that_runs_together_is_found_again_after_the_verdict() -> None:
    together = batch(1, [1, 2, 3, 4], one_by_one=False, run_timeout_s=1)
    verdict = watch().check(2 * SECOND, [state(1, 1)], {1: together}, {})
    assert verdict is not None
    # Until it was dead the engine went on to another item.
    failed, again = blame([state(1, 3)], {1: together}, verdict, DIED)
    assert failed == []
    assert [lease.together_max for lease in again] == [2] * 4


def test_a_batch_is_halved_until_the_culprit_is_alone() -> None:
    culprit = 77
    waiting = [batch(1, list(range(256)), one_by_one=False).leases]
    deaths = 0
    survivors = 0
    found: dict[int, str] = {}
    while waiting:
        leases = waiting.pop(0)
        if culprit not in leases:
            survivors += len(leases)
            continue
        deaths += 1
        one = EngineBatch(deaths, dict(leases), one_by_one=False, spec=Spec(kind="k"))
        failed, again = blame([state(deaths)], {deaths: one}, None, DIED)
        found |= {lease.lease_id: error.type for lease, error in failed}
        while again:
            size = again[0].together_max
            waiting.append({lease.lease_id: lease for lease in again[:size]})
            again = again[size:]
    assert found == {culprit: "EngineDied"}
    assert survivors == 255
    assert deaths == 9


def test_deaths_outside_of_a_run_are_nobodys_fault_but_not_for_ever() -> None:
    again = [1, 2]
    deaths = 0
    held = batch(1, [1, 2], one_by_one=False)
    failed: dict[int, str] = {}
    while not failed:
        deaths += 1
        failed, again = blamed([state(0)], held)
        assert deaths <= DEATHS_MAX
    assert deaths == DEATHS_MAX
    assert failed == {1: "EngineDied", 2: "EngineDied"}
    assert again == []
