"""Checks of the host, under real conditions where they can be made."""

import datetime as dt
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from multigpu.cli.doctor import host as doctor_host
from multigpu.cli.doctor.base import Verdict

from tests.client.cli.doctor.checks import checked, host_of, verdicts
from tests.client.cli.fleet_up import MGPUCTL

NOBODY = "65534"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change users or mount")


@pytest.mark.parametrize(("files", "verdict"), [("4096:4096", "ok"), ("512:4096", "warn"), ("128:4096", "fail")])
def test_limits(files: str, verdict: str) -> None:
    code = "from multigpu.cli.doctor import host as doctor_host; print(doctor_host.check_limits(None).verdict.value)"
    done = subprocess.run(
        ["prlimit", f"--nofile={files}", sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == verdict


def test_versions() -> None:
    message = checked(doctor_host.check_versions, host_of()).message
    assert "grpcio" in message
    assert message.endswith("; multigpu is pure Python")


def test_a_healthy_disk(tmp_path: Path) -> None:
    found = doctor_host.check_disk(host_of(data_dir=tmp_path / "not/yet"))
    assert {f.check for f in found} == {"file system", "disk", "fsync"}
    assert not [f for f in found if f.verdict is Verdict.FAIL and f.check != "disk"]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_by_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    assert not [f for f in doctor_host.check_disk(host_of(data_dir=Path("d"))) if "not there yet" in f.message]


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
def test_a_disk_of_another_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    code = (
        "import os; from pathlib import Path; from types import SimpleNamespace as N\n"
        "from multigpu.cli.doctor import host as doctor_host\n"
        f"os.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
        f"print(doctor_host.check_disk(N(master_config=N(data_dir=Path('/var/lib/multigpu-nobody'))))[0].message)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"user {NOBODY} can't write /var/lib/multigpu-nobody")


@pytest.mark.parametrize(("seconds", "verdict"), [(0.002, "ok"), (0.1, "warn"), (2.0, "fail")])
def test_fsync(seconds: float, verdict: str) -> None:
    assert verdicts([doctor_host.judge_fsync(seconds, "/data")]) == {"fsync": verdict}


def test_file_systems() -> None:
    lines = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:5 / /mnt/with\\040space rw - nfs4 server:/ rw\n"
    assert doctor_host.file_system(Path("/mnt/with space/data"), lines) == "nfs4"
    assert doctor_host.file_system(Path("/mnt/with"), lines) == "ext4"
    lines += "3 1 0:6 / /mnt/dépôt\\134x rw - nfs rw\n"
    assert doctor_host.file_system(Path("/mnt/dépôt\\x/data"), lines) == "nfs"


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = checked(doctor_host.check_ports, host_of(listen=f"127.0.0.1:{port}"))
        assert taken.verdict is Verdict.FAIL
        assert f"pid {os.getpid()}" in taken.message
    assert checked(doctor_host.check_ports, host_of(listen=f"127.0.0.1:{port}")).verdict is Verdict.OK
    foreign = checked(doctor_host.check_ports, host_of(listen="192.0.2.1:7433", tls_cert="a", tls_key="b"))
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
    found = doctor_host.judge_units(listed)
    assert verdicts([found]) == {"services": verdict}
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
    found = doctor_host.check_certificates(host_of(tls_cert=cert, tls_key=cert.replace(".crt", ".key")))
    assert verdicts(found) == {"certificate master.tls_cert": verdict, "key master.tls_key": "ok"}


def test_certificates_that_can_not_be_used(tmp_path: Path) -> None:
    cert = certificate(tmp_path / "master.crt", 60)
    key = tmp_path / "master.key"
    key.chmod(0o644)
    found = doctor_host.check_certificates(host_of(tls_cert=str(tmp_path / "none"), tls_key=str(key)))
    assert verdicts(found) == {"certificate master.tls_cert": "fail", "key master.tls_key": "fail"}
    assert (
        verdicts(doctor_host.check_certificates(host_of(tls_cert=str(key), tls_key=cert)))[
            "certificate master.tls_cert"
        ]
        == "fail"
    )
    assert checked(doctor_host.check_certificates, host_of()).verdict is Verdict.SKIP
