"""Faults of single GPUs on a host with eight: real processes, a simulated driver.

Times are those of the master's clock, which is this host's.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from multigpu import AdminClient
from multigpu.fleet import HealthState
from multigpu.v1 import device_pb2, task_pb2

from tests.fleet import until
from tests.gpu_host.host import Host

pytestmark = pytest.mark.slow

DEAD_LETTERED = task_pb2.OUTCOME_STATE_DEAD_LETTERED
SUCCEEDED = task_pb2.OUTCOME_STATE_SUCCEEDED
SICK = device_pb2.HEALTH_STATE_SICK
# Stop peer-to-peer traffic: the GPU is sick but usable. One that needs a reset is unusable, and is quarantined whatever
# the breaker's state.
ACTION_DRAIN_P2P = 3


def test_eight_gpus_work_and_report_that_they_are_simulated(host: Host) -> None:
    workers = host.workers()
    assert [workers[name].device.device_id for name in host.names] == host.gpus.uuids
    assert all(w.device.simulated for w in workers.values())
    assert "the driver is a simulation" in host.fleet.workers["gpu0"].log()
    outcomes = host.outcomes(host.submit("gpu.work", 48, seconds="0.1"))
    assert all(o.result.decode() == o.device_id for o in outcomes), "each ran where the master says"
    host.wait_until_used(*host.gpus.uuids)


@contextmanager
def lateness() -> Iterator[list[float]]:
    """How much later than it should a thread wakes up, at most: what the other load of this machine costs a process."""
    worst_s, stop = [0.0], threading.Event()

    def run() -> None:
        while not stop.is_set():
            due_s = time.monotonic() + 0.01
            time.sleep(0.01)
            worst_s[0] = max(worst_s[0], time.monotonic() - due_s)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield worst_s
    finally:
        stop.set()
        thread.join()


# Steps between the loss and the last dispatch, each of which a busy machine may delay: sampler, agent, master, engine.
STEPS = 4


def test_xid_79_moves_the_tasks_within_a_second_and_disturbs_no_other_gpu(host: Host) -> None:
    lost, gone = 3, "gpu3"
    sessions = {name: w.session_id for name, w in host.workers().items()}
    engines = host.engines()
    task_ids = host.submit("gpu.work", 200, seconds="0.15")
    until(lambda: all(len(host.leased(name)) > 1 for name in host.names), what="a running and a waiting task each")
    before = {name: host.leased(name) for name in host.names}
    with lateness() as worst_s:
        lost_s = time.time()
        host.gpus.lose(lost)
        until(lambda: gone in host.quarantined(), what=f"the quarantine of {gone}")
        until(lambda: "gpu_is_lost" in str(host.workers()[gone].health), what="the loss to be seen")
    outcomes = dict(zip(task_ids, host.outcomes(task_ids), strict=True))

    ends = {(o.state, o.attempts) for o in outcomes.values()}
    assert ends == {(SUCCEEDED, 1)}, "a lost device costs no task an attempt"
    assert before[gone]
    moved = [outcomes[i] for i in before[gone] if outcomes[i].worker_id != gone]
    slowest_s = max((o.stages.dispatch_time.ToNanoseconds() / 1e9 for o in moved), default=math.inf) - lost_s
    print(f"{len(moved)} tasks of {gone} were with other GPUs {slowest_s:.3f} s after the loss")
    latest_s = (
        max((o.stages.finish_time.ToNanoseconds() / 1e9 for o in outcomes.values() if o.worker_id == gone), default=0)
        - lost_s
    )
    limit_s = 1.0 + STEPS * worst_s[0]
    assert slowest_s < limit_s
    assert latest_s < limit_s, "a lost device finishes no task"

    after = host.workers()
    for name in host.names:
        if name == gone:
            continue
        assert (after[name].session_id, after[name].failed) == (sessions[name], 0)
        assert after[name].health.state == device_pb2.HEALTH_STATE_HEALTHY
        assert host.engines()[name] == engines[name], "its engine goes on"
        assert all(outcomes[i].worker_id == name for i in before[name]), "it keeps what it had"
    assert after[gone].session_id == sessions[gone], "the worker lives on without its device"
    assert after[gone].health.unusable
    assert {"xid_79", "gpu_is_lost"} & set(host.codes(gone))

    host.gpus.return_(lost, reset=True)  # as after a reset: the worker has to open the driver anew
    until(lambda: gone not in host.quarantined(), what=f"{gone} to be back by itself")
    host.wait_until_used(host.gpus.uuid(lost))
    assert not host.fleet.stats().breaker.tripped


def test_xid_13_charges_the_task_and_not_the_gpu(host: Host) -> None:
    [task_id] = host.submit("gpu.illegal_access", attempts_max=1)
    [outcome] = host.outcomes([task_id])
    assert (outcome.state, outcome.attempts) == (DEAD_LETTERED, 1), outcome
    workers = host.workers()
    assert workers[outcome.worker_id].health.state == device_pb2.HEALTH_STATE_HEALTHY
    assert not host.quarantined()
    # Its engine's CUDA context is lost: the next task there has a new one.
    host.wait_until_used(outcome.device_id)


def test_a_poison_task_is_a_dead_letter_after_two_devices_and_all_eight_stay_healthy(host: Host) -> None:
    engines = host.engines()
    [task_id] = host.submit("gpu.poison", attempts_max=10)
    [outcome] = host.outcomes([task_id])
    assert (outcome.state, outcome.attempts) == (DEAD_LETTERED, 2), outcome
    until(host.all_working, what="eight healthy GPUs and their engines")
    assert len([name for name in host.names if host.engines()[name] != engines[name]]) == 2, "two devices, each once"
    assert host.fleet.stats().breaker.quarantines == 0, "no device is blamed"
    host.wait_until_used(*host.gpus.uuids)


def test_a_gpu_on_which_different_tasks_fail_is_sick_and_returns_after_a_check(host: Host) -> None:
    task_ids: list[int] = []

    def quarantined() -> bool:
        # Tasks that wait behind a crash are recalled for the idle GPUs: submit more until enough have failed.
        task_ids.extend(host.submit("gpu.breaks_on", 60, attempts_max=2, on="6"))
        return host.quarantined() == {"gpu6"}

    until(quarantined, what="the quarantine of gpu6")
    assert host.codes("gpu6") in (["tasks_fail"], [])  # the worker may not know yet
    outcomes = host.outcomes(task_ids)
    assert all(o.state == SUCCEEDED for o in outcomes), "they ran elsewhere"
    assert "gpu6" not in {o.worker_id for o in outcomes}
    until(lambda: not host.quarantined(), what="gpu6 to pass its check")
    assert host.fleet.stats().breaker.quarantines == 1


def test_a_check_that_an_operator_asks_for_finds_a_sick_gpu_and_blames_no_other(host: Host) -> None:
    with AdminClient(host.fleet.address) as admin:
        for name in host.names:
            fit = admin.check_worker(name).health
            assert fit is not None and fit.state is HealthState.HEALTHY
        assert admin.stats().breaker.quarantines == 0
        host.gpus.lose(3)
        try:
            health = admin.check_worker("gpu3").health
            assert health is not None
            assert (health.state, health.unusable, health.reasons[0].code) == (HealthState.SICK, True, "xid_79")
        finally:
            host.gpus.return_(3)
        until(host.all_healthy, what="its return")


def test_three_sick_gpus_at_once_trip_the_breaker_and_the_third_works_on(host: Host) -> None:
    for i in (1, 2, 5):
        host.gpus.recovery_action(i, ACTION_DRAIN_P2P)
    breaker = until(lambda: (b := host.fleet.stats().breaker).tripped and b, what="the breaker to trip")
    assert (breaker.quarantines, breaker.quarantines_max) == (3, 2), "30 % of eight"
    until(lambda: [w.health.state for w in host.workers().values()].count(SICK) == 3, what="three sick ones")
    assert len(host.quarantined()) == 2
    errors = [line for line in host.fleet.master.log().splitlines() if '"level": "error"' in line]
    assert any("mgpuctl breaker reset" in line for line in errors), "the operator is told what to do"
    [third] = {"gpu1", "gpu2", "gpu5"} - host.quarantined()
    outcomes = host.outcomes(host.submit("gpu.work", 64, seconds="0.1"))
    assert not {o.worker_id for o in outcomes} & host.quarantined()
    host.wait_until_used(host.gpus.uuid(int(third.removeprefix("gpu"))))  # sick as it is
    host.gpus.lose(0)
    until(lambda: "gpu0" in host.quarantined(), what="the quarantine of one that can't run anything")
    # Its return counts as a reset only if the worker has seen the loss, not just the driver's event.
    until(lambda: "gpu_is_lost" in str(host.workers()["gpu0"].health), what="the loss to be seen")

    for i in (0, 1, 2, 5):
        host.gpus.return_(i)
    until(host.all_healthy, what="their return")
    assert host.fleet.stats().breaker.tripped, "only an operator resets it"
    host.reset_breaker()
    assert not host.fleet.stats().breaker.tripped


def test_a_driver_that_does_not_answer_makes_its_gpu_sick_and_not_its_worker_lost(host: Host) -> None:
    session_id = host.workers()["gpu7"].session_id
    host.gpus.hang(7)
    until(lambda: "gpu7" in host.quarantined(), what="the quarantine of gpu7")
    outcomes = host.outcomes(host.submit("gpu.work", 32, seconds="0.05"))
    assert "gpu7" not in {o.worker_id for o in outcomes}
    host.gpus.answer_(7)
    until(lambda: "gpu7" not in host.quarantined(), what="gpu7 to be back by itself")
    assert host.workers()["gpu7"].session_id == session_id, "the worker's session has not ended"


def test_full_gpus_cost_no_task_and_no_worker(host: Host) -> None:
    engines = host.engines()
    failed = sum(w.failed for w in host.workers().values())
    total = host.gpus.gpu(0).memory_total
    for i in range(7):
        host.gpus.use_memory(i, total)
    try:
        task_ids = host.submit("gpu.allocate", 8, attempts_max=50, bytes=str(2 << 30))
        until(lambda: sum(w.failed for w in host.workers().values()) > failed, what="an attempt without memory")
    finally:
        for i in range(7):
            host.gpus.use_memory(i, 0)
    outcomes = host.outcomes(task_ids)
    assert all(o.state == SUCCEEDED for o in outcomes), outcomes
    assert host.engines() == engines
    assert host.all_healthy()
