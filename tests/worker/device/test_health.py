"""The state machine of a device's health, resets, XIDs and engine starts. All of it is pure."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from multigpu_worker.device import reset_watch
from multigpu_worker.device.health import CHECK_MAX_S, CHECK_MIN_S, NOTICE_S, STEADY_S, Health, Reason, Severity, State
from multigpu_worker.device.interface import Telemetry
from multigpu_worker.device.reset_watch import ResetNote, ResetState, ResetWatch
from multigpu_worker.device.sampler import Sample
from multigpu_worker.device.xids import REMEDIES, XIDS, XidClass, xid_of
from multigpu_worker.health_monitor import HealthMonitor
from multigpu_worker.processes.start import KILLS_MAX, READY_S, EngineStart
from structlog.testing import capture_logs

LOST = Reason("gpu_is_lost", "it is gone", Severity.UNUSABLE)
NO_ENGINE = Reason("engine_fails", "no engine can start", Severity.NO_ENGINE)
HUNG = Reason("driver_hung", "no answer", Severity.SICK)
HOT = Reason("thermal_throttle", "it is hot", Severity.DEGRADED)


def state(health: Health) -> State:
    """The current state: mypy would narrow the attribute to an earlier value."""
    return health.state


def codes(health: Health) -> list[str]:
    return [reason.code for reason in health.reasons]


def sick(code: str = "xid_48", now_s: float = 1.0) -> Health:
    health = Health(0.0)
    health.happen(code, "memory", Severity.UNUSABLE, now_s)
    assert health.state is State.SICK
    return health


def pass_check(health: Health, now_s: float) -> None:
    assert health.check_due(now_s)
    health.begin_check(now_s)
    assert health.state is State.RECOVERING
    health.pass_check(now_s)


def test_heat_degrades_a_device_without_a_check_and_reasons_are_sorted_by_severity() -> None:
    health = Health(0.0)
    health.find([HOT], 1.0)
    assert (health.state, health.since_s, codes(health)) == (State.DEGRADED, 1.0, ["thermal_throttle"])
    health.find([HOT], 5.0)
    assert health.reasons[0].since_s == 1.0
    assert health.fit
    health.find([], 6.0)
    assert (health.state, health.since_s, codes(health)) == (State.HEALTHY, 6.0, [])
    health = Health(0.0)
    health.find([HOT, HUNG], 1.0)
    assert (health.state, health.unusable, codes(health)) == (State.SICK, False, ["driver_hung", "thermal_throttle"])
    for now_s in (2.0, 3.0):
        health.happen("xid_79", "it fell off the bus", Severity.UNUSABLE, now_s)
    assert codes(health) == ["xid_79", "driver_hung", "thermal_throttle"]
    assert health.reasons[0].since_s == 2.0
    assert health.unusable


def test_an_xid_makes_a_device_sick_until_a_check_passes_and_a_lost_one_is_checked_once_it_is_back() -> None:
    health = sick("xid_95", 10.0)
    assert health.unusable
    assert not health.check_due(10.0)
    assert health.next_check_s == 10.0 + CHECK_MIN_S
    health.begin_check(11.0)
    assert (state(health), health.unusable) == (State.RECOVERING, False)
    health.pass_check(12.0)
    assert (state(health), codes(health)) == (State.HEALTHY, [])
    health = Health(0.0)
    health.find([LOST], 1.0)
    assert not health.check_due(1e6)
    health.find([], 2_000.0)
    assert health.state is State.SICK, "no check was passed yet"
    assert health.unusable
    pass_check(health, 2_000.0)
    assert state(health) is State.HEALTHY


def test_the_delay_of_failing_checks_doubles_until_a_reset_is_detected() -> None:
    now_s = 100.0
    health = sick("canary_wrong", now_s)
    delays = []
    for _ in range(1100):  # four days
        delays.append(health.next_check_s - now_s)
        now_s = health.next_check_s
        assert health.check_due(now_s)
        health.begin_check(now_s)
        health.fail_check("canary_wrong", "wrong result", Severity.UNUSABLE, now_s)
        assert state(health) is State.SICK
    assert delays[:4] == [1.0, 2.0, 4.0, 8.0]
    assert delays[-1] == CHECK_MAX_S
    health = sick(now_s=100.0)
    health.reset_seen(100.1)
    assert health.next_check_s == 100.0 + CHECK_MIN_S, "the first delay stays"
    for _ in range(12):
        health.begin_check(health.next_check_s)
        health.fail_check("xid_48", "memory", Severity.UNUSABLE, health.next_check_s)
    now_s = health.next_check_s - CHECK_MAX_S + 1.0
    assert not health.check_due(now_s)
    health.reset_seen(now_s)
    assert health.check_due(now_s)


def test_the_health_monitor_reports_a_reset_once() -> None:
    watch = ResetWatch()
    seen: list[float] = []
    monitor: Any = SimpleNamespace(
        _events=SimpleNamespace(device_answers=lambda: None), _reset=watch, _now=lambda: 7.0,
        health=SimpleNamespace(reset_seen=seen.append),
    )  # fmt: skip
    watch.need("ecc_uncorrected", "errors")
    for action in (1, 1, 0, 0):
        sample = Sample(telemetry=Telemetry(), time_ns=1)
        HealthMonitor._look_for_reset(monitor, sample, [action])
    assert seen == [7.0]


def test_a_device_that_soon_falls_sick_again_waits_longer_for_its_check() -> None:
    health = Health(0.0)
    now_s = 0.0
    for delay_s in (1.0, 2.0, 4.0):
        health.happen("xid_119", "GSP", Severity.UNUSABLE, now_s)
        assert health.next_check_s == now_s + delay_s
        now_s += delay_s
        pass_check(health, now_s)
        now_s += 10.0
        health.find([HOT], now_s)  # a degraded device is fit, too
        health.find([], now_s + 1.0)
    now_s += STEADY_S
    health.happen("xid_119", "GSP", Severity.UNUSABLE, now_s)
    assert health.next_check_s == now_s + 1.0


@pytest.mark.parametrize("what", ["finding", "fault"])
def test_a_finding_or_a_fault_during_a_check_makes_it_void(what: str) -> None:
    health = sick()
    health.begin_check(2.0)
    if what == "finding":
        health.find([HUNG], 3.0)
    else:
        health.happen("xid_79", "bus", Severity.UNUSABLE, 3.0)
    assert not health.checking
    assert health.state is State.SICK
    assert "xid_48" in codes(health)
    with pytest.raises(AssertionError):
        health.pass_check(4.0)


def test_heat_does_not_void_a_check_and_holds_after_it() -> None:
    health = sick()
    health.begin_check(2.0)
    health.find([HOT], 3.0)
    health.happen("xid_63", "a row was remapped", Severity.DEGRADED, 3.0)
    assert health.checking
    health.pass_check(4.0)
    assert (state(health), set(codes(health))) == (State.DEGRADED, {"thermal_throttle", "xid_63"})
    health.find([], 5.0)
    health.pass_time(3.0 + NOTICE_S - 1)
    assert state(health) is State.DEGRADED
    health.pass_time(3.0 + NOTICE_S)
    assert state(health) is State.HEALTHY


def test_without_an_engine_the_device_gets_no_work_but_engines_may_use_it() -> None:
    health = Health(0.0)
    health.find([NO_ENGINE], 1.0)
    assert (health.state, health.unusable, health.barred) == (State.SICK, True, False)
    assert not health.check_due(1000.0), "no check before a start succeeds"
    health.find([], 1001.0)
    pass_check(health, 1001.0)
    assert health.fit
    health.find([LOST], 1002.0)
    assert (health.unusable, health.barred) == (True, True)


@pytest.mark.parametrize(
    ("what", "xids"),
    [
        (XidClass.APPLICATION, (13, 31, 32, 69)),
        (XidClass.SEQUEL, (43, 45, 154)),
        (XidClass.NOTICE, (63, 92, 9999)),
        (XidClass.CONTAINED, (94,)),
        (XidClass.RESET, (46, 48, 62, 64, 74, 95, 109, 119, 120, 140, 143, 158)),
        (XidClass.REBOOT, (79, 151)),
        (XidClass.PERSON, (54,)),
    ],
)
def test_classes_of_xids(what: XidClass, xids: tuple[int, ...]) -> None:
    assert {xid_of(code).reaction for code in xids} == {what}


def test_every_xid_has_a_meaning_and_those_for_operators_a_remedy() -> None:
    assert {XidClass.RESET, XidClass.REBOOT, XidClass.PERSON} <= set(REMEDIES)
    assert all(xid.meaning for xid in XIDS.values())


def test_an_engine_that_exits_or_is_rejected_cannot_start_and_one_that_is_killed_may_start_again() -> None:
    start = EngineStart()
    start.died("ended with exit code 1", killed=False)
    assert "exit code 1" in start.error(1.0, ready=False)
    start.reset()
    start.rejected("no such module")
    start.died("ended with exit code 1", killed=False)
    assert start.error(1.0, ready=False) == "no such module"
    assert start.error(2.0, ready=True) == ""
    start = EngineStart()
    for _ in range(KILLS_MAX - 1):
        start.died("was killed by SIGKILL", killed=True)
        assert start.error(1.0, ready=False) == ""
    start.died("was killed by SIGKILL", killed=True)
    assert "SIGKILL" in start.error(1.0, ready=False)


def test_an_engine_that_is_not_ready_in_time_cannot_start() -> None:
    start = EngineStart()
    errors = [
        start.error(at_s, ready=ready)
        for at_s, ready in (
            (0.0, True), (1.0, False), (1.0 + READY_S, False), (1.1 + READY_S, False), (1.2 + READY_S, True),
            (1.3 + READY_S, False),
        )
    ]  # fmt: skip
    assert [bool(error) for error in errors] == [False, False, False, True, False, False]


def test_a_reset_is_detected_when_the_driver_requires_nothing_any_more_and_not_by_a_falling_error_count() -> None:
    watch = ResetWatch()
    watch.need("xid_48", "ECC")
    watch.need("xid_95", "memory")
    for wanted in (False, False, True, True):
        assert watch.look(driver_blocked=wanted, ecc_uncorrected=None) == 0
        assert watch.needed == ("xid_48", "ECC"), "the first reason is kept"
    watch.look(driver_blocked=False, ecc_uncorrected=None)
    assert watch.needed is None
    watch = ResetWatch()
    assert [watch.look(driver_blocked=False, ecc_uncorrected=n) for n in (2, 2, None, 5)] == [0, 0, 0, 3]
    watch.need("ecc_uncorrected", "errors")
    assert watch.look(driver_blocked=False, ecc_uncorrected=5) == 0
    assert watch.needed is not None
    assert watch.look(driver_blocked=False, ecc_uncorrected=0) == 0
    assert watch.needed is not None, "a reload of the driver has the same effect"
    assert watch.look(driver_blocked=False, ecc_uncorrected=1) == 1


def test_the_next_process_knows_that_a_reset_is_needed_unless_the_host_was_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = ResetNote(tmp_path / "notes" / "gpu.json")
    watch = ResetWatch(note.read())
    watch.look(driver_blocked=True, ecc_uncorrected=3)
    note.keep(watch.state)
    assert not note.path.exists(), "no reset is needed"
    watch.need("xid_48", "ECC")
    note.keep(watch.state)

    def needed_after(*, wanted: bool | None, ecc_uncorrected: int | None) -> tuple[str, str] | None:
        next_watch = ResetWatch(ResetNote(note.path).read())
        assert next_watch.needed == ("xid_48", "ECC")
        next_watch.look(driver_blocked=wanted, ecc_uncorrected=ecc_uncorrected)
        return next_watch.needed

    for wanted in (None, True):
        for errors in (3, None):
            assert needed_after(wanted=wanted, ecc_uncorrected=errors) == watch.needed
    assert needed_after(wanted=False, ecc_uncorrected=3) is None
    assert needed_after(wanted=None, ecc_uncorrected=0) == watch.needed
    watch.look(driver_blocked=False, ecc_uncorrected=0)
    note.keep(watch.state)
    assert ResetWatch(ResetNote(note.path).read()).needed is None
    path = tmp_path / "gpu.json"
    watch = ResetWatch()
    watch.need("xid_79", "off the bus")
    ResetNote(path).keep(watch.state)
    assert ResetNote(path).read().needed is not None
    damaged = tmp_path / "damaged.json"
    damaged.write_text(path.read_text().replace('"errors": null', '"errors": "many"'))
    assert ResetNote(damaged).read().needed is None, "the worker ended by it at every start"
    (tmp_path / "boot_id").write_text("another")
    monkeypatch.setattr(reset_watch, "BOOT_ID", tmp_path / "boot_id")
    assert ResetNote(path).read().needed is None
    path.write_text("{")
    assert ResetNote(path).read().needed is None


def test_a_needed_reset_that_could_not_be_stored_is_stored_later(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a file in place of the folder")
    note = ResetNote(tmp_path / "notes" / "gpu.json")
    state = ResetState(("xid_79", "off the bus"))
    with capture_logs() as logs:
        note.keep(state)
        note.keep(state)
    assert [entry["event"] for entry in logs] == ["the reset state can't be stored"]
    (tmp_path / "notes").unlink()
    note.keep(state)
    assert ResetNote(note.path).read() == state
