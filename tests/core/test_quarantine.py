"""Quarantine of sick devices and their return, distinguishing a poison task from a sick device, and the breaker."""

import pytest
from multigpu_master.core import events as ev
from multigpu_master.core.ledger import Limits
from multigpu_master.core.model import OutcomeState, Task, TaskError, Worker
from multigpu_master.core.placement.explain import explain
from multigpu_master.core.spec import Spec
from multigpu_master.core.workers.info import (
    HEALTHY,
    Capability,
    Health,
    HealthReason,
    HealthState,
    Telemetry,
    WorkerInfo,
)

from tests.core.stage import Stage, lease_of, state_of

SICK = Health(state=HealthState.SICK, reasons=(HealthReason("xid_79", "it fell off the bus"),), unusable=True)
HANGS = Health(state=HealthState.SICK, reasons=(HealthReason("no_progress"),))
RECOVERING = Health(state=HealthState.RECOVERING)
DEGRADED = Health(state=HealthState.DEGRADED, reasons=(HealthReason("thermal_throttle"),))


class Fleet(Stage):
    """A stage with GPU workers, each on a device of its own, that may be silent as long as they like."""

    def __init__(self) -> None:
        super().__init__(Limits(session_timeout_s=1e9))

    def gpus(self, n: int, slots: int = 8) -> "Fleet":
        for i in range(n):
            self.gpu(f"w{i}", f"GPU-{i}", slots)
            self.says(f"w{i}", HEALTHY)
        return self

    def gpu(self, name: str, device_id: str, slots: int = 8, held: tuple[ev.HeldLease, ...] = ()) -> list[ev.Command]:
        capabilities = (Capability(kind="run"), Capability(kind="bad"))
        return self.join(WorkerInfo(worker_id=name, device_id=device_id, capabilities=capabilities, slots=slots), held)

    def get(self, name: str) -> Worker:
        return self.core.fleet.workers[name]

    def says(self, name: str, health: Health, after_s: float = 0.1) -> list[ev.Command]:
        worker = self.get(name)
        held = [ev.HeldLease(x.lease_id, x.task.task_id, x.attempt) for x in worker.leases.values()]
        return self.handle(ev.Heartbeat(worker.session, held, 1 << 30, Telemetry(), health=health), after_s)

    def breaks(self, task: Task, after_s: float = 0.1) -> Worker:
        """The task's attempt breaks the engine of whoever has it. Returns that worker."""
        lease = lease_of(task)
        self.fail(lease, "EngineDied", broke_engine=True, after_s=after_s)
        return lease.worker

    def wait(self, seconds: float = 1.0) -> None:
        """Lets pauses pass."""
        for _ in range(20):
            self.handle(ev.Tick(), seconds / 20)

    def quarantined(self) -> list[str]:
        return [w.worker_id for w in self.core.fleet.workers.values() if w.quarantined]


# --- quarantine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("health", [SICK, HANGS, RECOVERING])
def test_an_unfit_device_gets_nothing_until_it_is_fit_again(health: Health) -> None:
    fleet = Fleet().gpus(2)
    fleet.says("w0", health)
    tasks = fleet.submit(12)
    assert {lease_of(t).worker.worker_id for t in tasks if t.lease is not None} == {"w1"}
    fleet.says("w0", DEGRADED)
    assert {lease_of(t).worker.worker_id for t in tasks if t.lease is not None} == {"w0", "w1"}


def test_a_cordon_is_the_operators_whatever_health_says() -> None:
    fleet = Fleet().gpus(1)
    fleet.handle(ev.Cordon("w0"))
    fleet.says("w0", SICK)
    fleet.says("w0", HEALTHY)
    (task,) = fleet.submit()
    assert fleet.get("w0").cordon
    assert task.lease is None
    fleet.handle(ev.Uncordon("w0"))
    assert task.lease is not None


def test_explain_says_who_asked_for_a_check() -> None:
    fleet = Fleet().gpus(1)
    fleet.handle(ev.CheckDevice("w0"))
    (task,) = fleet.submit()
    (candidate,) = explain(fleet.core, task, fleet.now).candidates
    assert candidate.excluded_by == [
        "quarantined: an operator asked for a check, and its device has not passed a check yet"
    ]


def test_a_quarantine_survives_a_reconnect_until_the_worker_says_otherwise() -> None:
    fleet = Fleet().gpus(1)
    fleet.says("w0", SICK)
    (task,) = fleet.submit()
    fleet.gpu("w0", "GPU-0")
    assert task.lease is None
    fleet.says("w0", HEALTHY)
    assert task.lease is not None


def test_a_task_under_which_one_device_after_the_other_falls_sick_is_charged_after_two() -> None:
    """A kernel that hangs the GPU (XID 109, 46 or 119) would make the whole fleet unusable."""
    fleet = Fleet().gpus(8)
    (task,) = fleet.submit()
    devices: list[str] = []
    while task.outcome is None:
        fleet.wait(0.5)
        lease = lease_of(task)
        devices.append(lease.worker.worker_id)
        held = ev.HeldLease(lease.lease_id, task.task_id, lease.attempt, running=True)
        fleet.handle(ev.Heartbeat(lease.worker.session, [held], 1 << 30, Telemetry(), health=SICK))
        error = TaskError("DeviceFailed", "the device can't be used")
        fleet.handle(ev.Reports(lease.worker.session, failures=[ev.Failure(lease.lease_id, error, returned=True)]))
        assert task.attempts - (task.lease is not None) == max(0, len(devices) - 2)
    assert task.outcome.state is OutcomeState.DEAD_LETTERED
    assert "fell sick 5 times" in str(task.outcome.error)
    assert len(set(devices)) == 2 + task.spec.attempts_max


# --- sick device or poison task --------------------------------------------------------------------------------------


def test_a_task_that_breaks_two_devices_is_a_dead_letter_and_they_keep_their_good_name() -> None:
    fleet = Fleet().gpus(8)
    (task,) = fleet.submit(spec=Spec(kind="run", attempts_max=50, wait_for_worker=True))
    first = fleet.breaks(task)
    fleet.wait()
    second = fleet.breaks(task)
    assert first.device_key != second.device_key
    assert state_of(task) is OutcomeState.DEAD_LETTERED
    assert task.attempts == 2
    assert fleet.quarantined() == []
    assert not any(w.requested_check for w in fleet.core.fleet.workers.values())


def test_a_task_that_broke_an_engine_waits_for_another_device_and_others_do_not_wait_for_it() -> None:
    fleet = Fleet().gpus(2, slots=1)
    for name in ("w0", "w1"):
        fleet.get(name).pace.leases_max = 1
    (poison,) = fleet.submit()
    (long,) = fleet.submit()
    bad = fleet.breaks(poison)
    fleet.wait()
    assert poison.lease is None, "the other device is busy, and the one it broke is free"
    (good,) = fleet.submit()
    assert lease_of(good).worker is bad
    other = lease_of(long).worker
    fleet.report(lease_of(long))
    other.pace.leases_max = 1
    fleet.wait(0.2)
    assert lease_of(poison).worker is other


def test_with_one_device_attempts_are_bounded_as_ever() -> None:
    fleet = Fleet().gpus(1)
    tasks = fleet.submit(4)
    for _ in range(3):
        for task in tasks:
            fleet.breaks(task)
        fleet.wait(5)
    assert [state_of(t) for t in tasks] == [OutcomeState.DEAD_LETTERED] * 4
    assert [t.attempts for t in tasks] == [3] * 4
    assert not fleet.get("w0").quarantined


def suspected(fleet: Fleet) -> tuple[Worker, list[Task]]:
    """A device on which three different tasks broke the engine."""
    tasks = [fleet.submit(spec=Spec(kind="run", attempts_max=1, wait_for_worker=True))[0] for _ in range(6)]
    sick = lease_of(tasks[0]).worker
    tasks += fleet.submit(12, spec=tasks[0].spec)
    broken = [t for t in tasks if lease_of(t).worker is sick][:3]
    for task in broken[:2]:
        fleet.breaks(task)
    assert not sick.quarantined
    commands = fleet.fail(lease_of(broken[2]), "EngineDied", broke_engine=True, after_s=0.1)
    assert ev.SendDesiredState(sick.session) in commands
    return sick, broken


def test_a_device_on_which_different_tasks_break_is_checked_and_costs_no_attempt() -> None:
    fleet = Fleet().gpus(3)
    sick, broken = suspected(fleet)
    assert fleet.quarantined() == [sick.worker_id]
    assert sick.requested_check == 1
    # The first two had one attempt only and are gone; the third one's was given back.
    assert [state_of(t) for t in broken[:2]] == [OutcomeState.DEAD_LETTERED] * 2
    fleet.wait()
    assert lease_of(broken[2]).worker is not sick
    fleet.says(sick.worker_id, Health(checks_passed=1))
    assert fleet.quarantined() == []


def test_tasks_get_the_attempt_back_that_a_suspected_device_cost_them() -> None:
    fleet = Fleet().gpus(2)
    tasks = fleet.submit(16, spec=Spec(kind="run", attempts_max=2, wait_for_worker=True))
    sick = lease_of(tasks[0]).worker
    broken = [t for t in tasks if lease_of(t).worker is sick][:3]
    for task in broken:
        fleet.breaks(task)
    fleet.wait()
    for _ in range(2):  # two ordinary failures are what attempts_max allows, and the broken one does not count
        for task in broken:
            assert state_of(task) is None
            fleet.fail(lease_of(task))
        fleet.wait()
    assert [state_of(t) for t in broken] == [OutcomeState.DEAD_LETTERED] * 3


def test_a_suspicion_survives_sessions_and_is_asked_again() -> None:
    fleet = Fleet().gpus(2)
    sick, _ = suspected(fleet)
    commands = fleet.gpu(sick.worker_id, sick.info.device_id)
    assert ev.SendDesiredState(sick.session) in commands
    assert sick.quarantined
    fleet.says(sick.worker_id, Health(checks_passed=7))  # of an earlier master's asking
    assert not sick.quarantined


def test_many_tasks_of_a_broken_handler_do_not_take_the_fleet_down() -> None:
    fleet = Fleet().gpus(8)
    bad = Spec(kind="bad", attempts_max=3, wait_for_worker=True)
    tasks = fleet.submit(200, spec=bad)
    for _ in range(400):
        leased = [t for t in tasks if t.lease is not None]
        if not leased:
            fleet.wait(0.3)
            leased = [t for t in tasks if t.lease is not None]
        for task in leased[:8]:  # about one for each device, then a pause
            fleet.breaks(task)
        fleet.wait(0.3)
        if all(state_of(t) is not None for t in tasks):
            break
    assert {state_of(t) for t in tasks} == {OutcomeState.DEAD_LETTERED}
    assert fleet.core.quarantine.breaker.tripped_s == 0.0
    assert len(fleet.quarantined()) <= 1


def test_a_device_that_reports_that_it_is_sick_is_to_blame_for_broken_engines() -> None:
    fleet = Fleet().gpus(3)
    (task,) = fleet.submit(spec=Spec(kind="run", attempts_max=1, wait_for_worker=True))
    fleet.says(lease_of(task).worker.worker_id, HANGS)
    sick = fleet.breaks(task)
    fleet.wait()
    assert state_of(task) is None
    assert lease_of(task).worker is not sick
    fleet.breaks(task)  # the first on a healthy device: an attempt
    assert state_of(task) is OutcomeState.DEAD_LETTERED
    assert task.extra is not None
    assert len(task.extra.broke_on_devices) == 1


# --- the breaker -----------------------------------------------------------------------------------------------------


def tripped(fleet: Fleet) -> list[ev.Command]:
    commands: list[ev.Command] = []
    for name in ("w0", "w1", "w2"):
        commands = fleet.says(name, HANGS)
    return commands


def test_the_third_of_eight_trips_the_breaker_and_works_on() -> None:
    fleet = Fleet().gpus(8)
    (change,) = [c for c in tripped(fleet) if isinstance(c, ev.BreakerChanged)]
    assert change.tripped_s == fleet.now
    assert "3 of 8 devices" in change.message
    assert "mgpuctl breaker reset" in change.message
    assert fleet.quarantined() == ["w0", "w1"]
    assert [c for c in fleet.says("w3", HANGS) if isinstance(c, ev.BreakerChanged)] == [], "once"
    assert fleet.quarantined() == ["w0", "w1"]


def test_an_unusable_device_is_quarantined_although_the_breaker_has_tripped() -> None:
    fleet = Fleet().gpus(8)
    for name in ("w0", "w1", "w2", "w3"):
        fleet.says(name, SICK)
    assert fleet.core.quarantine.breaker.tripped_s
    assert fleet.quarantined() == ["w0", "w1", "w2", "w3"]
    fleet.says("w3", HEALTHY)
    assert fleet.quarantined() == ["w0", "w1", "w2"], "and they come back by themselves"


def test_only_a_person_resets_it_and_then_the_sick_are_quarantined() -> None:
    fleet = Fleet().gpus(8)
    tripped(fleet)
    fleet.wait(100_000)
    assert fleet.core.quarantine.breaker.tripped_s
    fleet = Fleet().gpus(8)
    tripped(fleet)
    commands = fleet.handle(ev.ResetBreaker())
    assert ev.BreakerChanged(0.0) in commands
    assert fleet.quarantined() == ["w0", "w1", "w2"]


def test_a_sick_worker_that_was_away_when_it_was_reset_is_quarantined_when_it_is_back() -> None:
    fleet = Fleet().gpus(8)
    tripped(fleet)
    fleet.handle(ev.SessionClosed(fleet.get("w2").session))
    fleet.handle(ev.ResetBreaker())
    fleet.gpu("w2", "GPU-2")
    fleet.says("w2", HANGS)  # as it did before
    assert fleet.quarantined() == ["w0", "w1", "w2"]


def test_a_reset_judges_no_worker_before_its_first_heartbeat() -> None:
    fleet = Fleet()
    info = WorkerInfo(worker_id="w", device_id="GPU-0", capabilities=(Capability(kind="run"),), slots=8)
    fleet.handle(ev.RegisterWorker(info, expected=True, quarantined=True))
    fleet.join(info)
    fleet.handle(ev.ResetBreaker())
    (task,) = fleet.submit()
    assert task.lease is None, "its device was sick when the master stopped"
    fleet.says("w", HEALTHY)
    assert lease_of(task).worker is fleet.get("w")


def test_slow_wear_does_not_trip_it_nor_does_one_device_that_flaps() -> None:
    fleet = Fleet().gpus(8)
    for i in range(5):
        fleet.says(f"w{i}", HANGS, 601)
    assert len(fleet.quarantined()) == 5
    for _ in range(20):
        fleet.says("w5", HANGS)
        fleet.says("w5", HEALTHY)
    assert not fleet.core.quarantine.breaker.tripped_s


def test_a_gpu_of_several_workers_counts_once() -> None:
    fleet = Fleet()
    for i in range(8):
        fleet.gpu(f"w{i}", f"GPU-{i // 4}")
    for i in range(4):
        fleet.says(f"w{i}", HANGS)
    assert fleet.quarantined() == ["w0", "w1", "w2", "w3"]
    assert not fleet.core.quarantine.breaker.tripped_s


def test_the_count_falls_once_the_window_has_passed() -> None:
    fleet = Fleet().gpus(8)
    fleet.says("w0", HANGS)
    breaker = fleet.core.quarantine.breaker
    assert breaker.count(fleet.now) == 1
    assert breaker.count(fleet.now + breaker.window_s + 1.0) == 0


def test_a_tripped_breaker_is_restored() -> None:
    fleet = Fleet()
    fleet.handle(ev.RestoreBreaker(5.0))
    fleet.gpus(2).says("w0", HANGS)
    assert fleet.quarantined() == []


def test_a_quarantine_is_restored_and_is_no_new_one() -> None:
    fleet = Fleet()
    info = WorkerInfo(worker_id="w0", device_id="GPU-0", capabilities=(Capability(kind="run"),))
    fleet.handle(ev.RegisterWorker(info, quarantined=True, requested_check=2))
    fleet.gpu("w0", "GPU-0")
    (task,) = fleet.submit()
    fleet.says("w0", Health(checks_passed=1))
    assert task.lease is None
    assert fleet.core.quarantine.breaker.count(fleet.now) == 0
    fleet.says("w0", Health(checks_passed=2))
    assert task.lease is not None


def test_a_device_that_got_well_while_the_master_was_away_is_back() -> None:
    fleet = Fleet()
    info = WorkerInfo(worker_id="w0", device_id="GPU-0", capabilities=(Capability(kind="run"),))
    fleet.handle(ev.RegisterWorker(info, quarantined=True))
    fleet.gpu("w0", "GPU-0")
    assert not fleet.get("w0").accepting, "its word is still to come"
    fleet.says("w0", HEALTHY)
    assert fleet.get("w0").accepting


def test_a_master_that_was_restarted_asks_for_a_check_that_was_not_passed_before() -> None:
    fleet = Fleet().gpus(2)
    for name in ("w0", "w1"):
        fleet.says(name, Health(checks_passed=5))  # of an earlier master's asking
    sick, _ = suspected(fleet)
    assert sick.requested_check == 6
    assert sick.quarantined


def test_marks_of_a_poisonous_kind_are_wiped_off() -> None:
    fleet = Fleet().gpus(2, slots=16)
    bad = Spec(kind="bad", attempts_max=9, wait_for_worker=True)
    tasks = fleet.submit(16, spec=bad)
    device = lease_of(tasks[0]).worker
    first, second = [t for t in tasks if lease_of(t).worker is device][:2]
    fleet.breaks(first)
    fleet.breaks(second)  # two marks
    fleet.wait()
    fleet.breaks(first)  # on the other one: condemned, and its kind with it
    good = next(t for t in fleet.submit(16) if t.lease is not None and lease_of(t).worker is device)
    fleet.breaks(good)
    assert not device.quarantined, "one task has broken it that is not known to break all"


def test_a_device_that_is_sick_after_all_is_blamed_for_what_made_it_suspect() -> None:
    """Its tasks kept their mark, and the next device on which their engine broke ended them as dead letters."""
    fleet = Fleet().gpus(2)
    fleet.handle(ev.Cordon("w1"))
    tasks = fleet.submit(3, spec=Spec(kind="run", attempts_max=5, wait_for_worker=True))
    for task in tasks:
        fleet.breaks(task)
    assert fleet.get("w0").requested_check == 1
    fleet.says("w0", SICK)
    fleet.handle(ev.SessionClosed(fleet.get("w0").session))
    fleet.handle(ev.Uncordon("w1"))
    fleet.wait(3)
    assert lease_of(tasks[0]).worker is fleet.get("w1")
    fleet.breaks(tasks[0])
    assert tasks[0].outcome is None


def test_a_worker_that_joins_a_suspected_device_has_a_check_of_its_own_to_pass() -> None:
    """The check's number was below that of the checks that the worker had passed under an earlier master."""
    fleet = Fleet().gpus(2)
    passed = Health(checks_passed=5)
    fleet.handle(ev.Cordon("w1"))
    tasks = fleet.submit(3, spec=Spec(kind="run", attempts_max=5, wait_for_worker=True))
    fleet.gpu("also w0", "GPU-0")
    for task in tasks:
        fleet.breaks(task)
    assert fleet.get("also w0").requested_check == 0, "the number of its last check is not known yet"
    fleet.says("also w0", passed)
    assert fleet.get("also w0").requested_check == 6
    assert fleet.quarantined() == ["w0", "also w0"]
    fleet.says("also w0", Health(checks_passed=6))
    assert fleet.quarantined() == ["w0"]


def test_two_sick_devices_that_reconnect_first_after_a_restart_do_not_trip_the_breaker() -> None:
    fleet = Fleet()
    for n in range(20):
        info = WorkerInfo(worker_id=f"w{n}", device_id=f"GPU-{n}", capabilities=(Capability(kind="run"),))
        fleet.handle(ev.RegisterWorker(info, expected=True))
    fleet.handle(ev.Recover([], fleet.now + 60.0))
    for n in range(2):
        fleet.gpu(f"w{n}", f"GPU-{n}")
        fleet.says(f"w{n}", HANGS)
    assert fleet.quarantined() == ["w0", "w1"]
    assert not fleet.core.quarantine.breaker.tripped_s


def test_two_sick_devices_that_reconnect_first_after_a_partition_do_not_trip_the_breaker() -> None:
    fleet = Fleet().gpus(20)
    for n in range(20):
        fleet.handle(ev.SessionClosed(fleet.get(f"w{n}").session))
    for n in range(2):
        fleet.gpu(f"w{n}", f"GPU-{n}")
        fleet.says(f"w{n}", HANGS)
    assert fleet.quarantined() == ["w0", "w1"]
    assert not fleet.core.quarantine.breaker.tripped_s
