"""Gangs: all ranks or none."""

import math
from dataclasses import replace

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.model import Energy, Lease, OutcomeState, Task, Worker
from multigpu_master.core.placement.explain import explain
from multigpu_master.core.placement.gangs import RESERVED_S, pack
from multigpu_master.core.scheduler import Limits
from multigpu_master.core.workers.info import Capability, Resident, Telemetry, WorkerInfo

from tests.core.stage import SPEC, Stage, error_of, held_lease, lease_of, outcome_of, state_of

PAIR = replace(SPEC, world_size=2)


def host(
    stage: Stage, *names: str, host: str = "h", slots: int = 1, device: str = "cpu", peers: tuple[str, ...] = ()
) -> list[Worker]:
    """Workers of a host, each of its own device, or all of one. `device` "": a GPU with the worker's name."""
    for name in names:
        stage.join(
            WorkerInfo(
                worker_id=name, host=host, capabilities=(Capability(kind="run"),), slots=slots,
                store_address=f"{host}:1", memory_total_bytes=100, device_id=device or name, nvlink_peers=peers,
            )
        )  # fmt: skip
    return [stage.core.fleet.workers[name] for name in names]


def ranks(task: Task) -> list[Lease]:
    gang = lease_of(task).gang
    assert gang is not None
    return gang.leases


def revoked(commands: list[ev.Command]) -> dict[int, list[int]]:
    return {c.session: [*c.lease_ids] for c in commands if isinstance(c, ev.Revoke)}


def save(stage: Stage, lease: Lease) -> list[ev.Command]:
    held = replace(held_lease(lease, running=True), checkpoint=b"step 5")
    return stage.handle(ev.Heartbeat(lease.worker.session, [held], 1 << 30, Telemetry()))


def test_a_gang_that_begins_elsewhere_leaves_the_worker_that_it_had_reserved_to_others_in_the_same_event() -> None:
    stage = Stage()
    for name in "abc":
        labels = {"site": "moon"} if name != "a" else {}  # no task with this label may fill a
        stage.join(WorkerInfo(worker_id=name, capabilities=(Capability(kind="run"),), slots=2, labels=labels,
                              store_address="h:1"))  # fmt: skip
    a, b, c = stage.core.fleet.workers.values()
    held = {lease_of(task).worker: lease_of(task) for task in stage.submit(3)}
    (gang,) = stage.submit(spec=PAIR)
    assert [worker.leases_limit for worker in (a, b, c)] == [0, 0, None]
    waiting = next(t for t in stage.submit(9, replace(SPEC, labels=(("site", "moon"),))) if t.lease is None)
    stage.report(held[a])
    assert (gang.lease, waiting.lease) == (None, None), "b is busy, and c is full"
    ended = list(c.leases)
    stage.handle(ev.Reports(c.session, ended, [b""] * len(ended)))
    assert {lease.worker for lease in ranks(gang)} == {a, c}
    assert lease_of(waiting).worker is b


def test_all_ranks_begin_at_once_and_alone() -> None:
    stage = Stage()
    workers = host(stage, "a", "b", "c")
    (gang,) = stage.submit(spec=PAIR)
    leases = ranks(gang)
    assert [lease.rank for lease in leases] == [0, 1]
    assert {lease.worker.worker_id for lease in leases} == {"a", "b"}
    (other, second) = stage.submit(2)
    assert lease_of(other).worker is lease_of(second).worker is workers[2]
    assert (stage.core.ledger.leased, stage.core.ledger.queues["default"].leased) == (3, 3)


@pytest.mark.parametrize("measured", [True, False])
def test_the_task_has_the_result_of_rank_0_once_all_have_succeeded(measured: bool) -> None:
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=PAIR)
    first, second = ranks(gang)
    energy = [Energy(30.0, 1, 0.1)]
    stage.handle(
        ev.Reports(first.worker.session, [first.lease_id], [b"of 0"], device_s=2.0, finish_s=stage.now, energy=energy)
    )
    assert gang.outcome is None
    assert first.worker.leases_limit is None, "its worker is free again"
    first.log, second.log = "of 0", "of 1"
    energy = [Energy(10.0, 2, 0.5)] if measured else []
    stage.handle(
        ev.Reports(
            second.worker.session, [second.lease_id], [b"of 1"], device_s=3.0, finish_s=stage.now, energy=energy
        ),
        5.0,
    )
    outcome = outcome_of(gang)
    assert outcome.energy == (Energy(40.0, 2, 0.2) if measured else None), "of all ranks, or none"
    assert gang.log == "of 0"
    assert (outcome.state, outcome.result, outcome.worker_id) == (OutcomeState.SUCCEEDED, b"of 0", "a")
    assert outcome.finish_s == 1000.0
    assert stage.core.ledger.leased == stage.core.ledger.unsettled == 0
    counters = stage.core.ledger.counters
    assert (counters.succeeded, counters.stale_reports) == (1, 0)
    (used,) = stage.core.usage.pop_sums().values()
    assert (used.succeeded, used.device_s) == (1, 5.0)
    assert (used.measured_s, used.joules, used.uncertainty_joules) == (
        (5.0, 40.0, 8.0) if measured else (0.0, 0.0, 0.0)
    )
    assert not any(w.leases or w.leased_bytes or w.leases_limit is not None for w in stage.core.fleet.workers.values())


def test_a_rank_that_fails_ends_all_and_charges_one_attempt() -> None:
    stage = Stage()
    host(stage, "a", "b", "c")
    (gang,) = stage.submit(spec=replace(PAIR, attempts_max=2))
    first, second = ranks(gang)
    commands = stage.fail(second)
    assert revoked(commands) == {first.worker.session: [first.lease_id]}
    assert (gang.attempts, gang.lease) == (1, None)
    assert stage.core.ledger.leased == 0
    stage.report(first)
    assert stage.core.ledger.counters.stale_reports == 1
    stage.handle(ev.Tick(), 1.0)
    stage.fail(ranks(gang)[0])
    assert state_of(gang) is OutcomeState.DEAD_LETTERED
    assert error_of(gang) == "ValueError"
    assert not any(w.leases or w.leases_limit is not None for w in stage.core.fleet.workers.values())


def test_a_lost_worker_ends_the_gang_uncharged() -> None:
    stage = Stage()
    host(stage, "a", "b", "c")
    (gang,) = stage.submit(spec=PAIR)
    first, second = ranks(gang)
    for name in ("a", "b"):
        stage.beat(name, running=True)
    commands = stage.handle(ev.SessionClosed(second.worker.session))
    assert revoked(commands) == {first.worker.session: [first.lease_id]}
    assert gang.attempts == 1
    again = ranks(gang)
    assert {lease.worker.worker_id for lease in again} == {"a", "c"}
    assert min(lease.lease_id for lease in again) > second.lease_id


def test_a_finished_rank_does_not_save_the_attempt() -> None:
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=PAIR)
    first, second = ranks(gang)
    stage.report(first)
    assert revoked(stage.fail(second)) == {}
    assert gang.lease is None
    assert stage.core.ledger.leased == 0
    stage.handle(ev.Tick(), 60.0)
    for lease in ranks(gang):
        stage.report(lease)
    assert outcome_of(gang).state is OutcomeState.SUCCEEDED


@pytest.mark.parametrize("finished", [False, True])
def test_a_cancelled_gang_ends_everywhere(finished: bool) -> None:
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=PAIR)
    first, second = ranks(gang)
    if finished:
        stage.report(first)
    told = revoked(stage.handle(ev.Cancel([gang])))
    assert told[second.worker.session] == [second.lease_id]
    assert state_of(gang) is OutcomeState.CANCELLED
    assert stage.core.ledger.leased == stage.core.ledger.unsettled == 0
    assert not any(w.leases for w in stage.core.fleet.workers.values())


def test_a_gang_reserves_busy_workers_and_small_tasks_fill_what_it_cannot_use_yet() -> None:
    stage = Stage()
    a, b = host(stage, "a", "b")
    (long,) = stage.submit()
    busy = lease_of(long).worker
    other = b if busy is a else a
    (gang,) = stage.submit(spec=PAIR)
    assert gang.lease is None
    (small, behind) = stage.submit(2)
    assert lease_of(small).worker is other, "a back-fill"
    assert behind.lease is None, "one for each slot"
    stage.report(lease_of(long))
    assert gang.lease is None, "the back-fill runs still"
    assert behind.lease is None, "nothing new begins"
    stage.report(lease_of(small))
    assert len(ranks(gang)) == 2
    for lease in ranks(gang):
        stage.report(lease)
    assert lease_of(behind)


def test_waiting_leases_of_reserved_workers_are_recalled_and_running_ones_end() -> None:
    stage = Stage()
    host(stage, "a", "b")
    tasks = stage.submit(4)
    first = [task for task in tasks if lease_of(task).lease_id == min(lease_of(task).worker.leases)]
    for task in first:
        worker = lease_of(task).worker
        held = [held_lease(x, running=x.task is task) for x in worker.leases.values()]
        stage.handle(ev.Heartbeat(worker.session, held, 1 << 30, Telemetry()))
    stage.submit(spec=PAIR)
    waiting = {lease_of(task).lease_id for task in tasks if task not in first}
    commands = stage.report(lease_of(first[0]))  # no worker had room before
    recalled = {lease_id for c in commands if isinstance(c, ev.Recall) for lease_id in c.lease_ids}
    assert recalled == waiting
    assert len(recalled) == 2


def test_another_gang_takes_no_reserved_worker_and_reserves_none() -> None:
    stage = Stage()
    workers = host(stage, "a", "b", "c", "d", "e")
    long = stage.submit(3)
    (large,) = stage.submit(spec=replace(SPEC, world_size=4))
    (small,) = stage.submit(spec=replace(PAIR, priority=4))
    reserved = {w.worker_id for w in workers if w.leases_limit is not None}
    assert (large.lease, small.lease, len(reserved)) == (None, None, 4), "the idle ones are reserved"
    (free,) = [task for task in long if lease_of(task).worker.worker_id not in reserved]
    stage.report(lease_of(free))
    assert {w.worker_id for w in workers if w.leases_limit is not None} == reserved
    assert small.lease is None


def test_of_several_ranks_rank_0_alone_has_partial_outputs_and_checkpoints() -> None:
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=PAIR)
    first, second = ranks(gang)
    for lease, data in ((second, b"of 1"), (first, b"of 0")):
        output = ev.PartialOutput(lease.lease_id, 0, data, "", checkpoint=data)
        stage.handle(ev.Partials(lease.worker.session, [output]))
    held = ev.HeldLease(second.lease_id, gang.task_id, 1, True, checkpoint=b"of 1", granted_by_this_journal=True)
    stage.handle(ev.Heartbeat(second.worker.session, [held], 1 << 30, Telemetry()))
    extra = gang.ensure_extra()
    assert (extra.partials, extra.checkpoint) == ([b"of 0"], b"of 0")


def test_one_kind_of_gang_reserves_workers_at_a_time() -> None:
    stage = Stage()
    workers = host(stage, "a", "b", "c", "d", "e")
    singles = stage.submit(5)
    for worker in workers:
        stage.beat(worker.worker_id, running=True)
    assert len({lease_of(task).worker for task in singles}) == 5
    stage.submit(spec=PAIR)
    reserved = [worker for worker in workers if worker.leases_limit is not None]
    assert len(reserved) == 2
    stage.submit(spec=replace(PAIR, memory_bytes=1))
    assert [worker for worker in workers if worker.leases_limit is not None] == reserved


def test_two_gangs_cannot_each_hold_half() -> None:
    stage = Stage()
    host(stage, "a", "b", "c", "d")
    running = stage.submit(4)
    four = replace(SPEC, world_size=4)
    (first,) = stage.submit(spec=four)
    (second,) = stage.submit(spec=replace(four, priority=4))
    for task in running:
        stage.report(lease_of(task))
    assert len(ranks(first)) == 4
    assert second.lease is None
    for lease in ranks(first):
        stage.report(lease)
    assert len(ranks(second)) == 4


def test_a_small_gang_passes_a_large_one_on_workers_that_are_not_reserved() -> None:
    stage = Stage()
    host(stage, "a", "b")
    (long,) = stage.submit()
    (large,) = stage.submit(spec=PAIR)
    assert large.lease is None
    host(stage, "c", "d", "e", host="other")
    assert len(ranks(large)) == 2, "of the workers that came"
    assert lease_of(long)


def test_a_reservation_is_bounded_in_time_and_comes_back_after_a_pause() -> None:
    stage = Stage()
    a, b = host(stage, "a", "b")
    (endless,) = stage.submit()
    for name in ("a", "b"):
        stage.beat(name, running=True)
    (gang,) = stage.submit(spec=PAIR)
    free = b if lease_of(endless).worker is a else a
    assert a.leases_limit is not None
    assert b.leases_limit is not None
    stage.handle(ev.Tick(), RESERVED_S)
    assert a.leases_limit is b.leases_limit is None
    assert not gang.waiting
    (small,) = stage.submit()
    assert lease_of(small).worker is free
    stage.report(lease_of(small))
    stage.handle(ev.Tick(), RESERVED_S)
    assert gang.waiting
    assert a.leases_limit is not None
    stage.report(lease_of(endless))
    assert len(ranks(gang)) == 2


def test_a_gang_that_ends_while_it_waits_gives_its_reservation_back() -> None:
    stage = Stage()
    a, b = host(stage, "a", "b")
    stage.submit()
    (gang,) = stage.submit(spec=PAIR)
    stage.handle(ev.Cancel([gang]))
    stage.handle(ev.Tick())
    assert a.leases_limit is b.leases_limit is None


def test_a_gang_is_not_adopted_after_a_restart_but_goes_on_from_its_checkpoint() -> None:
    stage = Stage()
    task = Task(PAIR, "", b"", "", task_id=50)
    stage.handle(ev.Recover([task], stage.now + 5.0))
    held = ev.HeldLease(60, 50, 1, True, checkpoint=b"step 9", granted_by_this_journal=True)
    stage.sessions += 1
    info = WorkerInfo(worker_id="a", capabilities=(Capability(kind="run"),), store_address="h:1")
    commands = stage.handle(ev.Hello(stage.sessions, info, [held]))
    assert revoked(commands) == {stage.sessions: [60]}
    assert task.lease is None
    assert task.ensure_extra().checkpoint == b"step 9"


def test_a_worker_that_reconnects_with_a_rank_keeps_no_lease_that_it_had_lost() -> None:
    stage = Stage()
    a, _ = host(stage, "a", "b")
    (small,) = stage.submit(spec=replace(SPEC, queue="small"))
    lost = held_lease(lease_of(small))
    stage.handle(ev.ConfigureQueue("small", paused=True))
    stage.handle(ev.Heartbeat(a.session, [], 1 << 30, Telemetry()))  # does not list it
    (gang,) = stage.submit(spec=PAIR)
    rank = next(lease for lease in ranks(gang) if lease.worker is a)
    commands = stage.join(a.info, [held_lease(rank), lost])
    assert revoked(commands) == {stage.sessions: [lost.lease_id]}
    assert [*a.leases.values()] == [rank]
    assert small.waiting


def test_workers_without_an_address_take_no_rank() -> None:
    stage = Stage()
    host(stage, "a")
    stage.worker("old")
    (answer,) = stage.submitted([Task(replace(PAIR, wait_for_worker=False), "", b"")]).results
    assert isinstance(answer, ev.Rejection)
    assert "have to run this task at the same time, and 1 could" in answer.message


def test_no_two_ranks_share_a_device() -> None:
    stage = Stage()
    host(stage, "a", "b", device="GPU-1")
    (answer,) = stage.submitted([Task(replace(PAIR, wait_for_worker=False), "", b"")]).results
    assert isinstance(answer, ev.Rejection)
    assert "2 workers, each on its own device" in answer.message
    (gang,) = stage.submit(spec=replace(PAIR, wait_for_worker=True))
    assert gang.lease is None
    assert "and 1 could" in explain(stage.core, gang, stage.now).summary
    host(stage, "c", device="GPU-2")
    assert sorted(lease.worker.device_key for lease in ranks(gang)) == ["GPU-1", "GPU-2"]


def test_a_reservation_is_of_different_devices() -> None:
    stage = Stage()
    first, second = host(stage, "a", "b", device="GPU-1")
    (other,) = host(stage, "c", device="GPU-2")
    stage.submit(3)
    for name in "abc":
        stage.beat(name, running=True)
    (gang,) = stage.submit(spec=PAIR)
    assert [w.leases_limit for w in (first, second, other)].count(0) == 2
    assert other.leases_limit == 0
    assert "2 are reserved" in explain(stage.core, gang, stage.now).summary


def test_an_elastic_gang_does_not_grow_by_another_worker_of_its_device() -> None:
    stage = Stage()
    host(stage, "a", "b", device="GPU-1")
    (gang,) = stage.submit(spec=replace(PAIR, world_size_min=1))
    (lease,) = ranks(gang)
    save(stage, lease)
    assert gang.lease is lease


def test_ranks_are_packed_by_host() -> None:
    stage = Stage()
    workers = [
        *host(stage, "a1", "a2", "a3", host="a"),
        *host(stage, "b1", "b2", host="b"),
        *host(stage, "c1", host="c"),
    ]
    names = [w.worker_id for w in pack(workers, 2)]
    assert names == ["b1", "b2"]
    assert [w.worker_id for w in pack(workers, 4)] == ["a1", "a2", "a3", "b1"]


def test_ranks_of_a_host_are_on_devices_that_nvlink_connects() -> None:
    stage = Stage()
    names = ("d0", "d1", "d2", "d3", "d4")
    linked = {"d0": "d3", "d3": "d0", "d1": "d2", "d2": "d1"}
    workers = [
        each for name in names for each in host(stage, name, device="", peers=(linked[name],) if name in linked else ())
    ]
    assert [w.worker_id for w in pack(workers, 2)] == ["d0", "d3"]
    assert [w.worker_id for w in pack(workers[1:], 2)] == ["d1", "d2"]
    assert [w.worker_id for w in pack(workers, 4)] == ["d0", "d3", "d1", "d2"]
    assert [w.worker_id for w in pack(workers, 1)] == ["d4"], "pairs stay whole"


def test_ranks_are_spread_over_hosts_on_request() -> None:
    stage = Stage()
    host(stage, "a1", "a2", "a3", host="a")
    host(stage, "b1", "b2", host="b")
    (gang,) = stage.submit(spec=replace(PAIR, world_size=3, spread_ranks=True))
    assert [lease.worker.worker_id for lease in ranks(gang)] == ["a1", "a2", "b1"]
    (second,) = stage.submit(spec=replace(PAIR, spread_ranks=True))
    assert [lease.worker.worker_id for lease in ranks(second)] == ["a3", "b2"]


def test_explain_says_which_workers_are_busy() -> None:
    stage = Stage()
    a, b = host(stage, "a", "b", slots=2)
    busy = lease_of(stage.submit()[0]).worker
    other = b if busy is a else a
    stage.handle(ev.Heartbeat(other.session, [], 1 << 30, Telemetry(), occupied_slots=1))
    (gang,) = stage.submit(spec=PAIR)
    why = {c.worker: c.excluded_by for c in explain(stage.core, gang, stage.now).candidates}
    assert "busy with 1 lease(s)" in why[busy]
    assert "cancelled calls still run in 1 slot(s)" in why[other]


def test_explain_estimates_when_a_gang_begins() -> None:
    stage = Stage()
    host(stage, "a", "b")
    for _ in range(20):  # such tasks take 8 s
        for task in stage.submit(2):
            lease = lease_of(task)
            reports = ev.Reports(lease.worker.session, [lease.lease_id], [b""])
            reports.start_s, reports.finish_s = stage.now, stage.now + 8.0
            stage.handle(reports, 8.0)
    stage.submit(2)
    for name in "ab":
        stage.beat(name, running=True)
    (gang,) = stage.submit(spec=PAIR)
    assert (
        "0 older or more important task(s) wait in its queue; judging by earlier run times, 2 may be idle in 8 s"
        in explain(stage.core, gang, stage.now).summary
    )
    assert "may be idle in 3 s" in explain(stage.core, gang, stage.now + 5.0).summary
    assert "may be idle" not in explain(stage.core, gang, stage.now + 8.0).summary, "they take longer than earlier ones"


def test_a_run_timeout_ends_the_attempt_everywhere() -> None:
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=replace(PAIR, run_timeout_s=5.0, attempts_max=1))
    for name in ("a", "b"):
        stage.beat(name, running=True)
    stage.handle(ev.Tick(), 16.0)
    assert error_of(gang) == "RunTimeout"
    assert not any(w.leases for w in stage.core.fleet.workers.values())


def memory(stage: Stage, worker: Worker, used_bytes: int, *models: Resident) -> None:
    """A heartbeat of a device of 100 bytes."""
    telemetry = Telemetry(memory_total_bytes=100, memory_used_bytes=used_bytes)
    held = [held_lease(lease, running=True) for lease in worker.leases.values()]
    stage.handle(ev.Heartbeat(worker.session, held, 1 << 30, telemetry, models=models))


def test_models_that_a_gang_does_not_use_take_no_memory_from_it() -> None:
    stage = Stage()
    pair = host(stage, "a", "b")
    for worker in pair:
        memory(stage, worker, 90, Resident(model="other", memory_bytes=40), Resident(model="own", memory_bytes=40))
    needs = replace(PAIR, memory_bytes=60)
    (own,) = stage.submit(spec=replace(needs, model="own"))
    assert own.lease is None, "its own model stays"
    (gang,) = stage.submit(spec=needs)
    assert len(ranks(gang)) == 2


def test_a_gang_reserves_workers_whose_tasks_take_the_memory_and_passes_over_those_that_are_short() -> None:
    stage = Stage()
    a, b, short = host(stage, "a", "b", "short")
    for worker, used_bytes in ((a, 0), (b, 0), (short, 90)):
        memory(stage, worker, used_bytes)
    first, second = stage.submit(2, spec=replace(SPEC, memory_bytes=80))
    for worker in (a, b):
        memory(stage, worker, 80)
    (gang,) = stage.submit(spec=replace(PAIR, memory_bytes=80))
    assert gang.lease is None
    assert [worker.leases_limit is None for worker in (a, b, short)] == [False, False, True]
    for task in (first, second):
        stage.report(lease_of(task))
    assert gang.lease is None, "their memory is in use still"
    for worker in (a, b):
        memory(stage, worker, 0)
    assert [lease.worker for lease in ranks(gang)] == [a, b]


def test_a_gang_whose_rank_0_has_ended_is_past_its_queue_timeout() -> None:
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=replace(PAIR, queue_timeout_s=5.0))
    first, second = ranks(gang)
    stage.report(first)
    until_s = stage.now + 5.0 + stage.core.ledger.limits.session_timeout_s
    while stage.now < until_s:
        stage.beat("a")
        stage.beat("b", running=True, after_s=1.0)
    assert gang.outcome is None
    stage.report(second)
    assert state_of(gang) is OutcomeState.SUCCEEDED


@pytest.mark.parametrize(("run_s", "first_ends_s"), [(70.0, (35.0, 70.0)), (650.0, (130.0, 140.0))])
def test_a_gang_begins_beside_tasks_that_run_for_longer_than_a_reservation(
    run_s: float, first_ends_s: tuple[float, float]
) -> None:
    """It never did: a reservation ended before its back-fill did, and the workers got other tasks of this length."""
    stage = Stage(limits=Limits(session_timeout_s=1e9))
    a, b = host(stage, "a", "b")
    others = stage.submit(200)
    (gang,) = stage.submit(spec=replace(PAIR, priority=1))
    ends_s = {a: stage.now + first_ends_s[0], b: stage.now + first_ends_s[1]}
    while gang.lease is None and others:
        due_s = stage.core.next_timer_s() or math.inf
        worker = min(ends_s, key=lambda each: ends_s[each])
        if ends_s[worker] > due_s:
            stage.handle(ev.Tick(), due_s - stage.now)
        else:
            stage.now = ends_s.pop(worker)
            stage.report(next(iter(worker.leases.values())), after_s=0.0)
        for each in (a, b):
            if each.leases and each not in ends_s:
                ends_s[each] = stage.now + run_s
        others = [task for task in others if task.outcome is None]
    assert gang.lease is not None


def test_a_gang_that_waits_for_another_device_says_so() -> None:
    """It said that it waits for 2 idle workers, and that 2 are idle."""
    stage = Stage()
    host(stage, "c", device="")
    stage.submit()
    host(stage, "a", "b", device="GPU-0")
    (gang,) = stage.submit(spec=PAIR)
    assert gang.lease is None
    summary = explain(stage.core, gang, stage.now).summary
    assert "waits for 2 idle workers on different devices: 1 are idle" in summary
