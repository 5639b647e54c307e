"""mgpuctl doctor: each check for what is well and for what is not, by real conditions where they can be had.

The GPUs are simulated (tests/fakes): the real pynvml reads a simulated driver.
"""

import datetime as dt
import importlib.metadata
import importlib.util
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu.cli import cli
from multigpu.cli.doctor import doctor
from multigpu.cli.doctor import fleet as doctor_fleet
from multigpu.cli.doctor import gpu as doctor_gpu
from multigpu.cli.doctor import host as doctor_host
from multigpu.cli.doctor.base import Check, Finding, Host, Verdict, fail, ok, warn
from multigpu.cli.rpc import Master
from multigpu.config import config
from multigpu.v1 import admin_service_pb2 as admin
from multigpu.v1.device_pb2 import DeviceTelemetry

from tests.client.cli.fleet.fleet_samples import DEGRADED, SICK, ago, cpu_worker, gpu_worker
from tests.client.cli.fleet_up import MGPUCTL
from tests.client.cli.unary_master import RejectionError, UnaryMaster, unary_master
from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet

NOBODY = "65534"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else or mount")


@pytest.fixture
def script() -> Iterator[UnaryMaster]:
    with unary_master() as scripted:
        scripted.answers["GetStats"] = lambda _: stats()
        scripted.answers["ListWorkers"] = admin.ListWorkersResponse()
        yield scripted


def stats(**fields: Any) -> admin.GetStatsResponse:
    now = Timestamp()
    now.FromNanoseconds(time.time_ns())
    version = importlib.metadata.version("multigpu")
    defaults: dict[str, Any] = {"version": version, "journal_writable": True, "server_time": now, "start_time": ago(60)}
    return admin.GetStatsResponse(**defaults | fields)


def host_of(address: str = "127.0.0.1:1", root: Path = Path("/"), worker: Any = None, **master: Any) -> Host:
    return Host(
        master_config=config.MasterConfig(**master),
        worker_config=config.WorkerConfig(**worker or {}),
        client_config=config.ClientConfig(master=address),
        master=Master(address),
        root=root,
    )


def verdicts(findings: list[Finding]) -> dict[str, str]:
    assert all(bool(f.remedy) == (f.verdict in (Verdict.WARN, Verdict.FAIL)) for f in findings), findings
    return {finding.check: finding.verdict.value for finding in findings}


def checked(check: Check, host: Host) -> Finding:
    return one(doctor.run_check(check, host))


def one(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    verdicts(findings)
    return findings[0]


# --- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    return SimulatedGpus(tmp_path / "gpus", n=4)


@pytest.fixture
def on_host(gpus: SimulatedGpus, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Host]:
    """A place whose driver is the simulated one: it is asked in a process of its own."""
    for name, value in gpus.env().items():
        monkeypatch.setenv(name, value)
    return host_of


def test_gpus_that_are_well(on_host: Callable[..., Host]) -> None:
    here = on_host()
    driver = checked(doctor_gpu.driver, here)
    assert driver.verdict is Verdict.OK
    assert "simulated" in driver.message
    assert "4 GPUs" in driver.message
    found = verdicts(doctor_gpu.gpus(here) + doctor_gpu.nvlink(here) + doctor_gpu.mig(here))
    assert found == {"gpus": "ok", "nvlink": "ok", "mig": "ok"}
    assert verdicts(doctor.run_check(doctor_gpu.permissions, here)) == {"permissions": "skip"}


def test_gpus_that_are_not(gpus: SimulatedGpus, on_host: Callable[..., Host]) -> None:
    gpus.lose(3)
    gpus.mig(2, 2)
    gpus.nvlink(0, 1, up=False)
    here = on_host()
    lost = checked(doctor_gpu.gpus, here)
    assert lost.verdict is Verdict.FAIL
    assert "GPU 3" in lost.message
    link = checked(doctor_gpu.nvlink, here)
    assert link.verdict is Verdict.WARN
    assert "GPU 0: 5 of 6" in link.message
    cut = checked(doctor_gpu.mig, here)
    assert cut.verdict is Verdict.WARN
    assert "GPU 2" in cut.message


def test_a_driver_that_does_not_answer(
    gpus: SimulatedGpus, on_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multigpu.cli.doctor.base.NVML_TIMEOUT_S", 2.0)
    gpus.hang(1)
    hung = checked(doctor_gpu.driver, on_host())
    assert hung.verdict is Verdict.FAIL
    assert "did not answer" in hung.message


def test_no_gpu_and_a_gpu_without_a_driver(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    assert checked(doctor_gpu.driver, host_of(root=tmp_path)).verdict is Verdict.SKIP
    device = tmp_path / "sys/bus/pci/devices/0000:1b:00.0"
    device.mkdir()
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    found = checked(doctor_gpu.driver, host_of(root=tmp_path))
    assert found.verdict is Verdict.FAIL
    assert "install NVIDIA's driver" in found.remedy
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel  580.159.03  Mon\n")
    assert "580.159.03" in checked(doctor_gpu.driver, host_of(root=tmp_path)).remedy


@pytest.mark.parametrize(
    ("torch", "driver", "verdict"),
    [
        ("12.6", "12.8", "ok"),
        ("12.8", "12.8", "ok"),
        ("12.6", "13.0", "ok"),
        ("12.8", "12.4", "warn"),
        ("13.0", "12.8", "fail"),
        ("", "12.8", "fail"),
        ("12.8", "", "skip"),
        ("", "", "skip"),
    ],
)
def test_cuda(torch: str, driver: str, verdict: str) -> None:
    assert one(doctor_gpu.judge_cuda("2.13.0", torch, driver)).verdict.value == verdict


def test_the_cuda_of_the_installed_torch_is_what_torch_says() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("no torch here")
    # Its own words, without the seconds that importing it takes.
    said = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    assert doctor_gpu.installed_torch_cuda() == (said["cuda"] or "")


def test_mps(gpus: SimulatedGpus, on_host: Callable[..., Host], tmp_path: Path, monkeypatch: Any) -> None:
    found = checked(doctor_gpu.mps, on_host())
    assert found.verdict is Verdict.WARN
    assert "nvidia-cuda-mps-control" in found.message
    assert checked(doctor_gpu.mps, on_host(worker={"mps": "on"})).verdict is Verdict.FAIL
    assert checked(doctor_gpu.mps, on_host(worker={"mps": "off"})).verdict is Verdict.SKIP
    # Only that they are on PATH counts: these do nothing.
    for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert checked(doctor_gpu.mps, on_host()).verdict is Verdict.OK
    gpus.mig(1, 2)
    assert "MIG is on for GPU 1" in checked(doctor_gpu.mps, on_host()).message


def test_device_files(tmp_path: Path) -> None:
    found = one(doctor_gpu.judge_device_files(tmp_path, ["nvidia0"]))
    assert found.verdict is Verdict.FAIL
    assert "no /dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0" in found.message
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
        (tmp_path / name).touch(mode=0o666)
    assert one(doctor_gpu.judge_device_files(tmp_path, ["nvidia0"])).verdict is Verdict.OK


@ROOT
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv to become somebody else with")
def test_device_files_that_are_somebody_elses() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
            (Path(folder) / name).touch()
            (Path(folder) / name).chmod(0o600 if name == "nvidia0" else 0o666)
        code = (
            "import os, sys; from pathlib import Path; from multigpu.cli.doctor import gpu as doctor_gpu\n"
            f"os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
            "found = doctor_gpu.judge_device_files(Path(sys.argv[1]), ['nvidia0'])[0]\n"
            "print(found.verdict.value, found.message)"
        )
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout == f"fail user {NOBODY} can't open /dev/nvidia0\n"


# --- the host --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("files", "verdict"), [("4096:4096", "ok"), ("512:4096", "warn"), ("128:4096", "fail")])
def test_limits(files: str, verdict: str) -> None:
    code = "from multigpu.cli.doctor import host as doctor_host; print(doctor_host.limits(None)[0].verdict.value)"
    done = subprocess.run(
        ["prlimit", f"--nofile={files}", sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == verdict


def test_versions() -> None:
    assert "grpcio" in checked(doctor_host.versions, host_of()).message


def test_a_disk_that_is_well(tmp_path: Path) -> None:
    found = doctor_host.disk(host_of(data_dir=tmp_path / "not/yet"))
    assert {f.check for f in found} == {"file system", "disk", "fsync"}
    assert not [f for f in found if f.verdict is Verdict.FAIL and f.check != "disk"]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    assert not [f for f in doctor_host.disk(host_of(data_dir=Path("d"))) if "not there yet" in f.message]


@ROOT
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A real one: a tmpfs of a mebibyte, in a mount namespace of its own."""
    point = tmp_path / "small"
    point.mkdir()
    command = f"mount -t tmpfs -o size=1m tmpfs {point} && exec {' '.join(MGPUCTL)} doctor --json --data-dir {point}"
    argv = ["unshare", "--mount", "sh", "-c", command]
    env = {**os.environ, "MGPU_MASTER": "127.0.0.1:1"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    if "permitted" in done.stderr:
        pytest.skip("no mounts here")
    assert done.returncode == 1, done.stderr
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["disk"]["verdict"] == "fail"
    assert checks["disk"]["message"].startswith("1.0 MiB of 1.0 MiB free")
    assert checks["file system"]["verdict"] == "warn"
    assert "tmpfs" in checks["file system"]["message"]


@ROOT
def test_a_disk_that_is_somebody_elses(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    code = (
        "import os; from pathlib import Path; from types import SimpleNamespace as N\n"
        "from multigpu.cli.doctor import host as doctor_host\n"
        f"os.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
        f"print(doctor_host.disk(N(master_config=N(data_dir=Path('/var/lib/multigpu-nobody'))))[0].message)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"user {NOBODY} can't write /var/lib/multigpu-nobody")


@pytest.mark.parametrize(("seconds", "verdict"), [(0.002, "ok"), (0.1, "warn"), (2.0, "fail")])
def test_fsync(seconds: float, verdict: str) -> None:
    assert one(doctor_host.judge_fsync(seconds, "/data")).verdict.value == verdict


def test_file_systems() -> None:
    lines = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:5 / /mnt/with\\040space rw - nfs4 server:/ rw\n"
    assert doctor_host.file_system(Path("/mnt/with space/data"), lines) == "nfs4"
    assert doctor_host.file_system(Path("/mnt/with"), lines) == "ext4"


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = checked(doctor_host.ports, host_of(listen=f"127.0.0.1:{port}"))
        assert taken.verdict is Verdict.FAIL
        assert f"pid {os.getpid()}" in taken.message
    assert checked(doctor_host.ports, host_of(listen=f"127.0.0.1:{port}")).verdict is Verdict.OK
    foreign = checked(doctor_host.ports, host_of(listen="192.0.2.1:7433", tls_cert="a", tls_key="b"))
    assert foreign.verdict is Verdict.FAIL


UNITS = """\
mgpu-master.service    loaded    active   running  multigpu master
mgpu-worker@0.service  loaded    {}   {}  multigpu worker on GPU 0
mgpu-gone.service      not-found inactive dead     mgpu-gone.service
"""


@pytest.mark.parametrize(
    ("listed", "verdict"),
    [
        (UNITS.format("active", "running"), "ok"),
        (UNITS.format("failed", "failed"), "fail"),
        (UNITS.format("activating", "auto-restart"), "warn"),
        ("mgpu-gone.service not-found inactive dead mgpu-gone.service\n", "skip"),
        ("", "skip"),
    ],
)
def test_services(listed: str, verdict: str) -> None:
    found = one(doctor_host.judge_units(listed))
    assert found.verdict.value == verdict
    if verdict == "fail":
        assert "mgpu-worker@0.service" in found.remedy


def certificate(path: Path, days: float) -> str:
    """A certificate that ends in so many days, and its key beside it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    end = dt.datetime.now(dt.UTC) + dt.timedelta(days=days)
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(end - dt.timedelta(days=90)).not_valid_after(end)
    path.write_bytes(built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    path.with_suffix(".key").write_bytes(pem)
    path.with_suffix(".key").chmod(0o600)
    return str(path)


@pytest.mark.parametrize(("days", "verdict"), [(60, "ok"), (5, "warn"), (-1, "fail"), (200, "fail")])
def test_certificates(tmp_path: Path, days: float, verdict: str) -> None:
    cert = certificate(tmp_path / "master.crt", days)
    found = doctor_host.certificates(host_of(tls_cert=cert, tls_key=cert.replace(".crt", ".key")))
    assert verdicts(found) == {"certificate master.tls_cert": verdict, "key master.tls_key": "ok"}


def test_certificates_that_can_not_be_used(tmp_path: Path) -> None:
    cert = certificate(tmp_path / "master.crt", 60)
    key = tmp_path / "master.key"
    key.chmod(0o644)
    found = doctor_host.certificates(host_of(tls_cert=str(tmp_path / "none"), tls_key=str(key)))
    assert verdicts(found) == {"certificate master.tls_cert": "fail", "key master.tls_key": "fail"}
    assert (
        verdicts(doctor_host.certificates(host_of(tls_cert=str(key), tls_key=cert)))["certificate master.tls_cert"]
        == "fail"
    )
    assert checked(doctor_host.certificates, host_of()).verdict is Verdict.SKIP


# --- the fleet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skew", "trip", "verdict"),
    [(0.001, 0.002, "ok"), (-0.2, 0.01, "ok"), (0.9, 1.9, "ok"), (1.0, 0.01, "warn"), (-60, 0.01, "fail")],
)
def test_clock(skew: float, trip: float, verdict: str) -> None:
    assert one(doctor_fleet.judge_clock(skew, trip)).verdict.value == verdict


def test_a_masters_clock_that_is_off(script: UnaryMaster) -> None:
    assert checked(doctor_fleet.clock, host_of(script.address)).verdict is Verdict.OK
    script.answers["GetStats"] = lambda _: stats(server_time=ago(120))
    found = checked(doctor_fleet.clock, host_of(script.address))
    assert found.verdict is Verdict.FAIL
    assert "2 min 0 s ahead of the master's" in found.message
    script.answers["GetStats"] = lambda _: stats(server_time=None)
    assert checked(doctor_fleet.clock, host_of(script.address)).verdict is Verdict.SKIP


def knows(script: UnaryMaster, *workers: admin.Worker) -> Host:
    script.answers["ListWorkers"] = admin.ListWorkersResponse(workers=workers)
    return host_of(script.address)


def test_worker_clocks(script: UnaryMaster) -> None:
    assert checked(doctor_fleet.worker_clocks, knows(script, cpu_worker())).verdict is Verdict.OK
    ahead = cpu_worker(telemetry=DeviceTelemetry(sample_time=ago(-30)))
    assert "ahead" in checked(doctor_fleet.worker_clocks, knows(script, ahead)).message
    behind = cpu_worker(telemetry=DeviceTelemetry(sample_time=ago(60)))
    assert checked(doctor_fleet.worker_clocks, knows(script, behind)).verdict is Verdict.WARN


def test_fleet_versions(script: UnaryMaster) -> None:
    assert checked(doctor_fleet.fleet_versions, knows(script, cpu_worker())).verdict is Verdict.OK
    found = checked(doctor_fleet.fleet_versions, knows(script, cpu_worker(version="0.0.9")))
    assert found.verdict is Verdict.WARN
    assert "box-cpu-0 0.0.9" in found.message


def test_workers(script: UnaryMaster) -> None:
    assert checked(doctor_fleet.workers, knows(script, cpu_worker(), gpu_worker(1))).verdict is Verdict.OK
    assert checked(doctor_fleet.workers, knows(script)).verdict is Verdict.WARN
    found = doctor_fleet.workers(
        knows(
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
    assert checked(doctor_fleet.model_memory, knows(script, alone, gpu_worker(1))).verdict is Verdict.OK
    assert checked(doctor_fleet.model_memory, knows(script, gpu_worker(1))).verdict is Verdict.SKIP
    twin = gpu_worker(0, worker_id="twin", model_memory_bytes=share * 9 // 10)
    found = checked(doctor_fleet.model_memory, knows(script, alone, twin, gpu_worker(1, model_memory_bytes=share)))
    assert found.verdict is Verdict.WARN
    assert "254 GiB of the 141 GiB that cuda:0 has" in found.message
    assert "device_workers = 2" in found.remedy
    elsewhere = gpu_worker(0, worker_id="twin", host="other", model_memory_bytes=share)
    assert checked(doctor_fleet.model_memory, knows(script, alone, elsewhere)).verdict is Verdict.OK
    gone = gpu_worker(0, worker_id="twin", model_memory_bytes=share, state=admin.WORKER_STATE_LOST)
    assert checked(doctor_fleet.model_memory, knows(script, alone, gone)).verdict is Verdict.OK


def test_journal_and_breaker(script: UnaryMaster) -> None:
    assert checked(doctor_fleet.journal, host_of(script.address)).verdict is Verdict.OK
    assert checked(doctor_fleet.breaker, host_of(script.address)).verdict is Verdict.OK
    tripped = admin.Breaker(tripped=True, quarantines=3, quarantines_max=2)
    script.answers["GetStats"] = lambda _: stats(journal_writable=False, breaker=tripped)
    full = checked(doctor_fleet.journal, host_of(script.address))
    assert full.verdict is Verdict.FAIL
    assert "journal_bytes_max" in full.message
    found = checked(doctor_fleet.breaker, host_of(script.address))
    assert found.verdict is Verdict.FAIL
    assert "3 devices fell sick together, more than 2: not all are quarantined" in found.message


def test_without_a_master() -> None:
    here = host_of()
    found = [finding for check in doctor_fleet.CHECKS for finding in doctor.run_check(check, here)]
    assert verdicts(found)["master"] == "warn"
    assert {f.verdict.value for f in found if f.check != "master"} == {"skip"}


def test_a_master_that_lets_us_not_in(script: UnaryMaster, tmp_path: Path) -> None:
    script.answers["GetStats"] = RejectionError(grpc.StatusCode.UNAUTHENTICATED, "a token is needed")
    found = checked(doctor_fleet.master, host_of(script.address))
    assert found.verdict is Verdict.FAIL
    assert "a token is needed" in found.message
    # What keeps us from even trying is a finding as well, not the end.
    env = {"MGPU_TLS_CA": str(tmp_path / "none"), "MGPU_MASTER": script.address}
    result = CliRunner().invoke(cli, ["doctor", "--json", "--data-dir", str(tmp_path)], env=env)
    checks = {check["check"]: check for check in json.loads(result.output)["checks"]}
    assert checks["master"]["verdict"] == "fail"
    assert checks["certificate worker.tls_ca"]["verdict"] == "fail"
    assert checks["disk"]["verdict"] in ("ok", "warn")
    assert result.exit_code == 1


# --- the whole -------------------------------------------------------------------------------------------------------


def test_exit_codes() -> None:
    well, careful, ill = ok("a", "m"), warn("b", "m", "r"), fail("c", "m", "r")
    assert doctor.exit_code(well) == 0
    assert doctor.exit_code(well + careful) == 6
    assert doctor.exit_code(well + careful + ill) == 1


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
        told = json.loads(result.output)
        checks = {check["check"]: check for check in told["checks"]}
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
        assert result.exit_code == {"ok": 0, "warn": 6, "fail": 1}[told["verdict"]]
        text = CliRunner().invoke(cli, [argv[0], *argv[2:]], env=listen)
        assert text.exit_code == result.exit_code
        assert text.output.splitlines()[0].startswith(("ok    driver", "skip  driver"))
