"""Elastic gangs: they begin with the workers that are idle, and grow at a checkpoint."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.ledger import Limits
from multigpu_master.core.workers.info import Telemetry

from tests.core.stage import SPEC, Stage, held_lease, lease_of
from tests.core.test_gangs import host, ranks, revoked, save

ELASTIC = replace(SPEC, world_size=3, world_size_min=2)


def test_an_elastic_gang_begins_with_the_workers_that_are_idle() -> None:
    stage = Stage()
    host(stage, "a", "b", "c", "d")
    gang, other = stage.submit(2, spec=ELASTIC)
    assert len(ranks(gang)) == 3
    assert other.lease is None, "a single worker is too few"
    for rank in ranks(gang):
        stage.report(rank)
    assert len(ranks(other)) == 2, "it begins as soon as it can"


def test_an_elastic_gang_grows_at_a_checkpoint_uncharged() -> None:
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=replace(ELASTIC, attempts_max=1))
    first, second = ranks(gang)
    assert save(stage, first) and lease_of(gang) is first, "there is no other worker"
    host(stage, "c")
    assert lease_of(gang) is first, "it loses nothing before it has saved"
    stage.handle(
        ev.Heartbeat(first.worker.session, [held_lease(first, running=True)], 1 << 30, Telemetry())
    )  # fmt: skip
    assert lease_of(gang) is first, "this heartbeat has no new checkpoint"
    commands = save(stage, first)
    assert revoked(commands)[second.worker.session] == [second.lease_id]
    assert [lease.worker.worker_id for lease in ranks(gang)] == ["a", "b", "c"]
    assert gang.attempts == 1
    assert gang.extra is not None
    assert (gang.extra.checkpoint, gang.extra.losses) == (b"step 5", 0)
    assert gang.extra.ended_attempts[-1].reason == "it begins again with more workers, which are idle"
    host(stage, "d")
    largest = lease_of(gang)
    save(stage, largest)
    assert lease_of(gang) is largest, "it has all that it may"


def test_a_gang_grows_also_if_its_checkpoint_comes_with_a_partial_output() -> None:
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=ELASTIC)
    first = lease_of(gang)
    host(stage, "c")
    stage.handle(ev.Partials(first.worker.session, [ev.PartialOutput(first.lease_id, 0, b"0.5", "", b"step 5")]))
    assert len(ranks(gang)) == 3
    assert gang.extra is not None
    assert gang.extra.checkpoint == b"step 5"


def test_a_gang_is_not_interrupted_for_a_checkpoint_for_which_there_is_no_room() -> None:
    stage = Stage(limits=Limits(bytes_max=100))
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=ELASTIC)
    first = lease_of(gang)
    host(stage, "c")
    checkpoint = replace(held_lease(first, running=True), checkpoint=bytes(1000))
    stage.handle(ev.Heartbeat(first.worker.session, [checkpoint], 1 << 30, Telemetry()))
    stage.handle(ev.Partials(first.worker.session, [ev.PartialOutput(first.lease_id, 0, b"", "", bytes(1000))]))
    assert lease_of(gang) is first, "it would begin from nothing"


@pytest.mark.parametrize("leave", [lambda name, now: ev.Drain(name, now + 3600), lambda name, _: ev.Cordon(name, "")])
def test_a_gang_is_interrupted_only_if_it_begins_again_with_more_workers(
    leave: Callable[[str, float], ev.Drain | ev.Cordon],
) -> None:
    """It was interrupted long before the deadline of a drain, and waited for workers."""
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=ELASTIC)
    first = lease_of(gang)
    for name in "ab":
        stage.handle(leave(name, stage.now))
    host(stage, "c", "d")
    save(stage, first)
    assert lease_of(gang) is first, "it would have two workers again"
    host(stage, "e")
    save(stage, first)
    assert {lease.worker.worker_id for lease in ranks(gang)} == {"c", "d", "e"}


def test_a_gang_of_a_paused_queue_does_not_grow() -> None:
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=ELASTIC)
    first = lease_of(gang)
    host(stage, "c")
    stage.handle(ev.ConfigureQueue("default", paused=True))
    save(stage, first)
    assert lease_of(gang) is first, "it could not begin again"


def test_a_gang_does_not_grow_by_workers_that_have_other_work_or_once_a_rank_has_ended() -> None:
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=ELASTIC)
    first, second = ranks(gang)
    host(stage, "c")
    stage.submit()
    save(stage, first)
    assert lease_of(gang) is first, "c has a task"
    stage.report(second)
    host(stage, "d")
    save(stage, first)
    assert lease_of(gang) is first, "rank 1 has ended"


def test_an_elastic_gang_goes_on_smaller_without_a_lost_worker() -> None:
    stage = Stage()
    workers = host(stage, "a", "b", "c")
    (gang,) = stage.submit(spec=ELASTIC)
    assert len(ranks(gang)) == 3
    stage.handle(ev.SessionClosed(workers[1].session), stage.core.ledger.limits.session_timeout_s + 1)
    assert {lease.worker.worker_id for lease in ranks(gang)} == {"a", "c"}


def test_an_elastic_gang_reserves_as_many_workers_as_it_needs_at_least() -> None:
    stage = Stage()
    workers = host(stage, "a", "b", "c")
    busy = stage.submit(3)
    (gang,) = stage.submit(spec=ELASTIC)
    assert sum(worker.leases_limit is not None for worker in workers) == 2
    stage.report(lease_of(busy[0]))
    assert gang.lease is None
    for task in busy[1:]:
        if lease_of(task).worker.leases_limit is not None:
            stage.report(lease_of(task))
    assert len(ranks(gang)) == 2


@pytest.mark.parametrize("limit", ["device_memory_bytes", "memory_usage"])
def test_a_gang_grows_although_its_workers_still_report_its_memory(limit: str) -> None:
    """It was restarted at each checkpoint, never with more workers."""
    stage = Stage()
    if limit == "memory_usage":
        stage.handle(ev.SetStrategy("memory_usage"))
    host(stage, "a", "b")
    spec = replace(ELASTIC, memory_bytes=60) if limit == "device_memory_bytes" else ELASTIC
    (gang,) = stage.submit(spec=spec)
    first, second = ranks(gang)
    host(stage, "c")
    full = Telemetry(memory_total_bytes=100, memory_used_bytes=90)
    stage.handle(ev.Heartbeat(second.worker.session, [held_lease(second, running=True)], 1 << 30, full))
    held = replace(held_lease(first, running=True), checkpoint=b"step 5")
    stage.handle(ev.Heartbeat(first.worker.session, [held], 1 << 30, full))
    assert sorted(lease.worker.worker_id for lease in ranks(gang)) == ["a", "b", "c"]


def test_a_gang_does_not_grow_while_another_waits_that_would_get_its_workers() -> None:
    stage = Stage()
    host(stage, "a", "b")
    (gang,) = stage.submit(spec=ELASTIC)
    first = lease_of(gang)
    (urgent,) = stage.submit(spec=replace(SPEC, world_size=3, priority=2))
    host(stage, "c")
    save(stage, first)
    assert (lease_of(gang), urgent.lease) == (first, None)
