"""AdminClient against a real fleet: every call changes or shows what its name says, and errors say what is wrong."""

import time
from collections.abc import Iterator
from typing import Any

import multigpu
import pytest
from multigpu.fleet import HealthState, Role, WorkerState

from tests.fleet import Fleet, until

FLEET = {"workers": 2}


@pytest.fixture
def admin(fleet: Fleet) -> Iterator[multigpu.AdminClient]:
    with multigpu.AdminClient(fleet.address) as client:
        yield client


def test_workers_are_cordoned_and_drained(admin: multigpu.AdminClient) -> None:
    first, second = admin.list_workers()
    assert first.state is second.state is WorkerState.ACTIVE
    assert first.device.device_id == "cpu"
    assert first.health is None or first.health.state is HealthState.HEALTHY
    assert first.telemetry is not None
    assert first.telemetry.power_watts is None, "a CPU's power is unknown"
    assert "echo" in {capability.kind for capability in first.capabilities}
    cordoned = admin.cordon_worker(first.worker_id, reason="a fan is loud")
    assert (cordoned.cordoned, cordoned.cordon_reason) == (True, "a fan is loud")
    assert not admin.uncordon_worker(first.worker_id).cordoned
    drained = admin.drain_worker(first.worker_id, grace_s=30)
    assert drained.state is WorkerState.DRAINING
    assert drained.drain_deadline is not None and drained.drain_deadline.tzinfo is not None
    admin.uncordon_worker(first.worker_id)
    with pytest.raises(multigpu.InvalidRequestError, match="connected"):
        admin.forget_worker(first.worker_id)
    with pytest.raises(multigpu.InvalidRequestError, match="handlers"):
        admin.reload_handlers(first.worker_id)
    with pytest.raises(multigpu.NotFoundError, match="nobody"):
        admin.cordon_worker("nobody")


def test_a_worker_checks_its_device_when_asked(fleet: Fleet, admin: multigpu.AdminClient) -> None:
    for number in (1, 2):
        checked = admin.check_worker("w0")
        assert checked.health is not None
        assert (checked.health.state, checked.health.checks_passed) == (HealthState.HEALTHY, number)
    assert admin.stats().breaker.quarantines == 0, "a device that is checked is not sick"
    until(lambda: not any(each.quarantined for each in admin.list_workers()), 10)
    with pytest.raises(multigpu.NotFoundError, match="nobody"):
        admin.check_worker("nobody")


def test_queues_and_strategies(fleet: Fleet, admin: multigpu.AdminClient) -> None:
    assert admin.pause_queue("nightly").paused
    with fleet.client() as client:
        handle = client.submit("echo", b"x", queue="nightly", request_id="held back")
        (queue,) = (each for each in admin.list_queues() if each.queue == "nightly")
        assert (queue.queued, queue.paused) == (1, True)
        assert queue.oldest_age_s is not None
        explanation = admin.explain("held back")
        assert "paused" in explanation.summary
        assert (explanation.task.task_id, len(explanation.candidates)) == (handle.id, 2)
        assert not admin.resume_queue("nightly").paused
        assert handle.result(120) == b"x"
    limits = admin.set_queue_limits("nightly", tasks_max=5).limits
    assert (limits.tasks_max, limits.bytes_max) == (5, 0)
    before = admin.get_strategy().strategy
    assert admin.set_strategy("round_robin") == "round_robin"
    found = admin.get_strategy("nightly")
    assert (found.strategy, found.inherited) == ("round_robin", True)
    assert before in {each.name for each in found.available}
    admin.set_strategy(before)
    with pytest.raises(multigpu.InvalidRequestError, match="round_robin"):
        admin.set_strategy("by magic")


def test_dead_letters(fleet: Fleet, admin: multigpu.AdminClient) -> None:
    with fleet.client() as client:
        handles = client.submit_many("fail", [b""] * 3, queue="broken", attempts_max=1)
        ids = [handle.id for handle in handles if isinstance(handle, multigpu.TaskHandle)]
    until(lambda: admin.count(queue="broken").dead_lettered == 3)
    listed = list(admin.list_dead_letters("broken"))
    newest = [task.task_id for task in listed]
    assert newest == ids[::-1]
    assert list(admin.requeue_dead_letters(queue="broken").task_ids) == newest
    until(lambda: admin.count(queue="broken").dead_lettered == 3)
    assert admin.delete_dead_letters(newest[:1]).deleted == 1
    assert admin.delete_dead_letters(newest[:1]).unknown_task_ids == (newest[0],)
    assert admin.delete_dead_letters(queue="broken").deleted == 2
    assert list(admin.list_dead_letters("broken")) == []
    with pytest.raises(multigpu.InvalidRequestError, match="either"):
        admin.requeue_dead_letters()


def test_tasks_are_listed_by_what_they_are(fleet: Fleet, admin: multigpu.AdminClient) -> None:
    with fleet.client() as client:
        client.run("echo", b"x", queue="listed", request_id="one")
        with pytest.raises(multigpu.TaskError):
            client.run("fail", b"", queue="listed", attempts_max=1)
    succeeded = [multigpu.OutcomeState.SUCCEEDED]
    until(lambda: [task.request_id for task in admin.list_tasks(queue="listed", outcomes=succeeded)] == ["one"])
    assert [task.kind for task in admin.list_tasks(queue="listed", kind="fail")] == ["fail"]
    assert admin.count(queue="listed", states=[multigpu.TaskState.QUEUED]).queued == 0
    with pytest.raises(TypeError, match="there is no filter 'colour'"):
        admin.count(colour="red")  # type: ignore[call-arg]
    assert admin.cancel("one", "unheard of").unknown == ("unheard of",)


def test_tasks_that_wait_to_run_again_are_listed(fleet: Fleet, admin: multigpu.AdminClient) -> None:
    slow: Any = {"queue": "retried", "backoff_initial_s": 60.0, "backoff_max_s": 60.0}
    with fleet.client() as client:
        failing = client.submit("fail", b"", **slow)
        waiting = client.submit("nobody has this kind", b"", queue="retried", wait_for_worker=True)
        until(lambda: [task.task_id for task in admin.list_tasks(queue="retried", retrying=True)] == [failing.id])
        assert admin.count(queue="retried", retrying=True).queued == 1
        assert admin.count(queue="retried").queued == 2
        assert list(admin.list_tasks(queue="retried", retrying=True, states=[multigpu.TaskState.LEASED])) == []
        admin.cancel(failing.id, waiting.id)


def test_a_queue_has_rates(fleet: Fleet, admin: multigpu.AdminClient) -> None:
    with fleet.client() as client:
        list(client.map("echo", [b"x"] * 20, queue="rated"))
        held = client.submit("nobody has this kind", b"", queue="rated", wait_for_worker=True)
    queue = until(lambda: next(each for each in admin.list_queues() if each.queue == "rated" and each.end_rate))
    assert 0 < queue.end_rate < queue.submit_rate
    assert isinstance(admin.history(), list)
    admin.cancel(held.id)


def test_stats_models_and_tokens(admin: multigpu.AdminClient) -> None:
    stats = admin.stats()
    assert stats.version
    assert stats.workers_active == 2
    assert not stats.breaker.tripped
    assert not admin.reset_breaker().tripped
    assert admin.list_models("no such model") == []
    with pytest.raises(multigpu.NotFoundError, match="no such model"):
        admin.load_model("no such model")
    with pytest.raises(multigpu.InvalidRequestError, match="require"):
        admin.create_token("alice", [Role.SUBMIT], ttl_s=60)


async def test_the_asynchronous_client_is_the_same(fleet: Fleet) -> None:
    async with multigpu.AsyncAdminClient(fleet.address) as admin:
        assert [worker.state for worker in await admin.list_workers()] == [WorkerState.ACTIVE] * 2
        assert [task async for task in admin.list_dead_letters("nothing")] == []
    with pytest.raises(multigpu.ClientClosedError):
        await admin.stats()


def test_no_master_is_an_error_at_once() -> None:
    with (
        multigpu.AdminClient("127.0.0.1:1", connect_timeout_s=0) as admin,
        pytest.raises(multigpu.UnavailableError, match="connection refused"),
    ):
        admin.stats()


def test_a_worker_that_restarts_after_a_check_is_not_checked_again(fleet: Fleet, admin: multigpu.AdminClient) -> None:
    admin.check_worker("w0")
    fleet.workers["w0"].kill()
    fleet.start_worker("w0")
    until(lambda: (w := admin.list_workers()[0]).state is WorkerState.ACTIVE and w.health is not None, 20)
    time.sleep(1)  # a check would begin at once
    worker = admin.list_workers()[0]
    assert worker.health is not None
    assert (worker.health.state, worker.health.checks_passed, worker.quarantined) == (HealthState.HEALTHY, 0, False)
    assert admin.stats().breaker.quarantines == 0
    assert admin.check_worker("w0").health is not None


def test_checks_in_a_row_begin_at_once(admin: multigpu.AdminClient) -> None:
    begun_s = time.monotonic()
    for _ in range(6):  # with the delays of a device that is sick again and again: 1 + 2 + 4 + 8 + 16 + 32 s
        admin.check_worker("w0")
    assert time.monotonic() - begun_s < 45


def test_a_lost_worker_is_not_checked(fleet: Fleet, admin: multigpu.AdminClient) -> None:
    """The last test: the worker is killed."""
    fleet.workers["w1"].kill()
    until(lambda: admin.list_workers()[1].state is WorkerState.LOST, 10)
    with pytest.raises(multigpu.InvalidRequestError, match="'w1' is lost"):
        admin.check_worker("w1")
