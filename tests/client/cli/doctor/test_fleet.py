"""Checks of the fleet, and the whole command."""

import json
import queue
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from multigpu.cli import cli
from multigpu.cli.doctor import doctor
from multigpu.cli.doctor import fleet as doctor_fleet
from multigpu.cli.doctor.base import Finding, Host, Verdict, fail, ok, warn
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1 import worker_service_pb2
from multigpu.v1.device_pb2 import DeviceTelemetry

from tests.client.cli.doctor.checks import checked, host_of, one, stats, verdicts
from tests.client.cli.fleet.fleet_samples import DEGRADED, SICK, ago, cpu_worker, gpu_worker
from tests.client.cli.unary_master import RejectionError, UnaryMaster, unary_master
from tests.fleet import Fleet, rejected, until


@pytest.fixture
def script() -> Iterator[UnaryMaster]:
    with unary_master() as scripted:
        scripted.answers["GetStats"] = lambda _: stats()
        scripted.answers["ListWorkers"] = admin.ListWorkersResponse()
        yield scripted


@pytest.mark.parametrize(
    ("skew", "trip", "verdict"),
    [(0.001, 0.002, "ok"), (-0.2, 0.01, "ok"), (0.9, 1.9, "ok"), (1.0, 0.01, "warn"), (-60, 0.01, "fail")],
)
def test_clock(skew: float, trip: float, verdict: str) -> None:
    assert verdicts([doctor_fleet.judge_clock(skew, trip)]) == {"clock": verdict}


def test_a_masters_clock_that_is_off(script: UnaryMaster) -> None:
    assert checked(doctor_fleet.check_clock, host_of(script.address)).verdict is Verdict.OK
    script.answers["GetStats"] = lambda _: stats(server_time=ago(120))
    found = checked(doctor_fleet.check_clock, host_of(script.address))
    assert found.verdict is Verdict.FAIL
    assert "2 min ahead of the master's" in found.message
    script.answers["GetStats"] = lambda _: stats(server_time=None)
    assert checked(doctor_fleet.check_clock, host_of(script.address)).verdict is Verdict.SKIP


def host_with(script: UnaryMaster, *workers: admin.Worker) -> Host:
    script.answers["ListWorkers"] = admin.ListWorkersResponse(workers=workers)
    return host_of(script.address)


def test_worker_clocks(script: UnaryMaster) -> None:
    assert checked(doctor_fleet.check_worker_clocks, host_with(script, cpu_worker())).verdict is Verdict.OK
    ahead = cpu_worker(telemetry=DeviceTelemetry(sample_time=ago(-30)))
    assert "ahead" in checked(doctor_fleet.check_worker_clocks, host_with(script, ahead)).message
    behind = cpu_worker(telemetry=DeviceTelemetry(sample_time=ago(60)))
    assert checked(doctor_fleet.check_worker_clocks, host_with(script, behind)).verdict is Verdict.WARN


def test_fleet_versions(script: UnaryMaster) -> None:
    assert checked(doctor_fleet.check_fleet_versions, host_with(script, cpu_worker())).verdict is Verdict.OK
    found = checked(doctor_fleet.check_fleet_versions, host_with(script, cpu_worker(version="0.0.9")))
    assert found.verdict is Verdict.WARN
    assert "box-cpu-0 0.0.9" in found.message


def test_workers(script: UnaryMaster) -> None:
    assert checked(doctor_fleet.check_workers, host_with(script, cpu_worker(), gpu_worker(1))).verdict is Verdict.OK
    assert checked(doctor_fleet.check_workers, host_with(script)).verdict is Verdict.WARN
    found = doctor_fleet.check_workers(
        host_with(
            script,
            gpu_worker(0),
            gpu_worker(1, health=SICK, quarantined=True),
            gpu_worker(2, health=DEGRADED),
            gpu_worker(3, state=admin.WORKER_STATE_LOST),
            gpu_worker(4, quarantined=True),
        )
    )
    assert [f.verdict.value for f in found] == ["fail", "warn", "fail", "fail"]
    assert "xid_79" in found[0].message
    assert "by itself" not in found[0].remedy, "the reasons may ask for a person"


def test_workers_of_one_device_take_no_more_than_it_has(script: UnaryMaster) -> None:
    share = 141 << 30
    alone = gpu_worker(0, model_memory_bytes=share * 9 // 10)
    assert checked(doctor_fleet.check_model_memory, host_with(script, alone, gpu_worker(1))).verdict is Verdict.OK
    assert checked(doctor_fleet.check_model_memory, host_with(script, gpu_worker(1))).verdict is Verdict.SKIP
    twin = gpu_worker(0, worker_id="twin", model_memory_bytes=share * 9 // 10)
    found = checked(
        doctor_fleet.check_model_memory, host_with(script, alone, twin, gpu_worker(1, model_memory_bytes=share))
    )
    assert found.verdict is Verdict.WARN
    assert "254 GiB of the 141 GiB that cuda:0 has" in found.message
    assert "device_workers = 2" in found.remedy
    elsewhere = gpu_worker(0, worker_id="twin", host="other", model_memory_bytes=share)
    assert checked(doctor_fleet.check_model_memory, host_with(script, alone, elsewhere)).verdict is Verdict.OK
    gone = gpu_worker(0, worker_id="twin", model_memory_bytes=share, state=admin.WORKER_STATE_LOST)
    assert checked(doctor_fleet.check_model_memory, host_with(script, alone, gone)).verdict is Verdict.OK


def test_journal_and_breaker(script: UnaryMaster) -> None:
    assert checked(doctor_fleet.check_journal, host_of(script.address)).verdict is Verdict.OK
    assert checked(doctor_fleet.check_breaker, host_of(script.address)).verdict is Verdict.OK
    tripped = admin.Breaker(tripped=True, quarantines=3, quarantines_max=2)
    script.answers["GetStats"] = lambda _: stats(journal_writable=False, breaker=tripped)
    full = checked(doctor_fleet.check_journal, host_of(script.address))
    assert full.verdict is Verdict.FAIL
    assert "journal_bytes_max" in full.message
    found = checked(doctor_fleet.check_breaker, host_of(script.address))
    assert found.verdict is Verdict.FAIL
    assert "3 devices fell sick together, more than 2: not all are quarantined" in found.message


def test_without_a_master() -> None:
    here = host_of()
    found = [finding for check in doctor_fleet.CHECKS for finding in doctor.run_check(check, here)]
    assert verdicts(found)["master"] == "warn"
    assert {f.verdict.value for f in found if f.check != "master"} == {"skip"}


def test_a_master_that_rejects_the_token(script: UnaryMaster, tmp_path: Path) -> None:
    script.answers["GetStats"] = RejectionError(grpc.StatusCode.UNAUTHENTICATED, "a token is needed")
    found = checked(doctor_fleet.check_master, host_of(script.address))
    assert found.verdict is Verdict.FAIL
    assert "a token is needed" in found.message
    # Unreadable certificates are findings too: the other checks run.
    env = {"MGPU_TLS_CA": str(tmp_path / "none"), "MGPU_MASTER": script.address}
    result = CliRunner().invoke(cli, ["doctor", "--json", "--data-dir", str(tmp_path)], env=env)
    checks = {check["check"]: check for check in json.loads(result.output)["checks"]}
    assert checks["master"]["verdict"] == "fail"
    assert checks["certificate worker.tls_ca"]["verdict"] == "fail"
    assert checks["disk"]["verdict"] in ("ok", "warn")
    assert result.exit_code == 1


def test_exit_codes() -> None:
    passed, warned, failed = ok("a", "m"), warn("b", "m", "r"), fail("c", "m", "r")
    assert doctor.exit_code([passed]) == 0
    assert doctor.exit_code([passed, warned]) == 6
    assert doctor.exit_code([passed, warned, failed]) == 1


def test_a_check_that_breaks_does_not_hide_the_others() -> None:
    def broken(_: Host) -> list[Finding]:
        raise PermissionError(13, "Permission denied", "/proc/x")

    found = one(doctor.run_check(broken, host_of()))
    assert found.verdict is Verdict.FAIL
    assert "/proc/x" in found.message


def test_the_whole_command_on_a_real_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Fleet(tmp_path, workers=1) as fleet:
        listen = {"MGPU_MASTER_LISTEN": fleet.address, "MGPU_MASTER": fleet.address}
        argv = ["doctor", "--json", "--data-dir", str(fleet.data_dir)]
        result = CliRunner().invoke(cli, argv, env=listen)
        printed = json.loads(result.output)
        checks = {check["check"]: check for check in printed["checks"]}
        for name in (
            "master",
            "journal",
            "clock",
            "worker clocks",
            "fleet versions",
            "workers",
            "breaker",
            "port listen",
        ):
            assert checks[name]["verdict"] == "ok", checks[name]
        assert f"pid {fleet.master.pid}" in checks["port listen"]["message"]
        assert result.exit_code == {"ok": 0, "warn": 6, "fail": 1}[printed["verdict"]]
        text = CliRunner().invoke(cli, [argv[0], *argv[2:]], env=listen)
        assert text.exit_code == result.exit_code
        assert text.output.splitlines()[0].startswith(("ok    driver", "skip  driver"))


def doctor_checks(fleet: Fleet) -> dict[str, dict[str, str]]:
    environment = {"MGPU_MASTER_LISTEN": fleet.address, "MGPU_MASTER": fleet.address}
    result = CliRunner().invoke(cli, ["doctor", "--json", "--data-dir", str(fleet.data_dir)], env=environment)
    return {check["check"]: check for check in json.loads(result.output)["checks"]}


def test_doctor_names_the_model_folders_that_a_worker_cannot_serve(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    (repository / "empty").mkdir(parents=True)
    (repository / "bad").mkdir()
    (repository / "bad" / "model.toml").write_text("engin = 'x'\n")
    with Fleet(tmp_path / "fleet", workers=1, worker_flags=["--model-repository", str(repository)]) as fleet:
        found = doctor_checks(fleet)["models"]
        assert found["verdict"] == "warn"
        assert found["message"].startswith("2 models can't be served\nbad on w0: ")
        assert "unknown" in found["message"]
        assert f"empty on w0: {repository}/empty holds no model" in found["message"]
        done = CliRunner().invoke(cli, ["generate", "x", "--model", "bad", "--master", fleet.address])
        assert (done.exit_code, "the model 'bad' can't be served: " in done.output) == (1, True), done.output


def test_doctor_says_why_a_worker_was_rejected_until_it_joins(tmp_path: Path) -> None:
    with Fleet(tmp_path, workers=1) as fleet:
        assert doctor_checks(fleet)["rejected workers"]["verdict"] == "ok"
        second = fleet.start_worker("w0")
        until(lambda: "another process has a session as worker" in second.log(), 60)
        found = doctor_checks(fleet)["rejected workers"]
        assert found["verdict"] == "fail"
        assert found["message"].startswith("w0 (ipv4:127.0.0.1:")
        assert "ago: another process has a session as worker 'w0'; stop one of them" in found["message"]
        second.kill()

        hello = worker_service_pb2.Hello(protocol_version=1, worker_id="old")
        with rejected(grpc.StatusCode.FAILED_PRECONDITION, "upgrade the worker"):
            list(fleet.sessions.Session(iter([worker_service_pb2.SessionRequest(hello=hello)]), timeout=20))
        assert "upgrade the worker" in doctor_checks(fleet)["rejected workers"]["message"]
        fleet.start_worker("old")
        fleet.wait_for_workers("old")
        assert "old (" not in doctor_checks(fleet)["rejected workers"]["message"]


def test_the_master_keeps_a_bounded_number_of_rejections_that_can_be_displayed(tmp_path: Path) -> None:
    with Fleet(tmp_path, workers=0) as fleet:
        for number in range(102):
            hello = worker_service_pb2.Hello(protocol_version=2, worker_id=f"w{number}\x1b[31m" + 200 * "x")
            with rejected(grpc.StatusCode.INVALID_ARGUMENT, "worker_id"):
                list(fleet.sessions.Session(iter([worker_service_pb2.SessionRequest(hello=hello)]), timeout=20))
        kept = fleet.stats().worker_rejections
        assert [r.worker_id[:12] for r in (kept[0], kept[-1])] == ["w2\\x1b[31mxx", "w101\\x1b[31m"]
        assert len(kept) == 100
        assert max(len(r.worker_id) for r in kept) == 128


def test_a_worker_whose_heartbeat_is_invalid_counts_as_rejected_but_a_takeover_does_not(tmp_path: Path) -> None:
    session = worker_service_pb2.SessionRequest

    def hello(worker_id: str) -> worker_service_pb2.SessionRequest:
        kinds = [worker_service_pb2.Capability(kind="k")]
        return session(
            hello=worker_service_pb2.Hello(
                protocol_version=2, worker_id=worker_id, slots=1, process="p", capabilities=kinds
            )
        )

    with Fleet(tmp_path, workers=0) as fleet:
        beat = session(heartbeat=worker_service_pb2.Heartbeat(catalog=worker_service_pb2.Catalog()))
        with rejected(grpc.StatusCode.INVALID_ARGUMENT, "capabilities are missing"):
            list(fleet.sessions.Session(iter([hello("beats"), beat]), timeout=20))
        waits: queue.SimpleQueue[worker_service_pb2.SessionRequest] = queue.SimpleQueue()
        waits.put(hello("moves"))
        first = fleet.sessions.Session(iter(waits.get, None), timeout=20)
        assert next(first).HasField("welcome")
        second = fleet.sessions.Session(iter([hello("moves")]), timeout=20)
        assert next(second).HasField("welcome")
        with rejected(grpc.StatusCode.ABORTED):
            list(first)
        (kept,) = fleet.stats().worker_rejections
        assert (kept.worker_id, "capabilities are missing" in kept.reason) == ("beats", True)
        first.cancel()
        second.cancel()
