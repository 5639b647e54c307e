"""Installation of the services by the deploy script, below a --root: files, units, keys, and a host that joins."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.deployment import NAME, ROOT, deploy, deployed, environment, everything_in, joining, needs_systemd
from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet


@pytest.mark.slow
@needs_systemd
def test_services_are_deployed_once_and_removed_completely(checkout: Path, root: Path, gpus: SimulatedGpus) -> None:
    root.mkdir()
    arguments = ("--root", str(root), "--listen", "0.0.0.0:7433")
    dry = deployed(checkout, *arguments, "--dry-run", **gpus.env())
    assert not everything_in(root)
    first = deployed(checkout, *arguments, **gpus.env())
    # The run writes exactly the files that the dry run lists.
    wrote = {line.split()[1] for line in first.splitlines() if line.startswith("    wrote ")}
    assert wrote == {line.split()[2] for line in dry.splitlines() if line.startswith("would write: ")}
    assert wrote

    before = everything_in(root)
    assert "wrote" not in deployed(checkout, *arguments, **gpus.env())
    after = everything_in(root)
    # systemd's tools write etc/passwd and the like again.
    assert [name for name in before if before[name] != after.get(name) and not name.startswith("etc")] == []
    assert after.keys() == before.keys()

    # The image contains no key, and not the name of the host that made it.
    assert [name for name in before if name.endswith((".key", ".crt", ".token"))] == []
    files = [path for part in ("etc/multigpu", "etc/systemd") for path in (root / part).rglob("*") if path.is_file()]
    assert [path for path in files if re.search(f'["=]{socket.gethostname()}', path.read_text())] == []
    assert "multigpu:" in (root / "etc/passwd").read_text()
    state = subprocess.run(
        ["systemctl", f"--root={root}", "is-enabled", "mgpu.target", f"mgpu-worker@{gpus.uuids[7]}.service"],
        capture_output=True, text=True, timeout=30, check=False,
    ).stdout  # fmt: skip
    assert state.split() == ["enabled", "enabled"]
    config = (root / "etc/multigpu/config.toml").read_text()
    assert "require_tokens = true" in config

    # The next run keeps an operator's edit of the configuration, and installs fewer workers for fewer GPUs.
    (root / "etc/multigpu/config.toml").write_text(config + "# mine\n")
    assert "kept:" in deployed(checkout, *arguments, **gpus.env(), GPU_COUNT="2")
    assert (root / "etc/multigpu/config.toml").read_text().endswith("# mine\n")
    assert workers_of(root) == 2

    asked = deploy(checkout, "--root", str(root), "--uninstall")
    assert asked.returncode == 1
    assert "asks before it removes" in asked.stderr
    deployed(checkout, "--root", str(root), "--uninstall", "--yes")
    assert [name for name in everything_in(root) if "multigpu" in name or "mgpu" in name] == []
    assert "multigpu:" not in (root / "etc/passwd").read_text()


def workers_of(root: Path) -> int:
    wants = root / "etc/systemd/system/mgpu.target.wants"
    return len([path for path in wants.iterdir() if path.name.startswith("mgpu-worker@")])


@needs_systemd
def test_a_second_run_keeps_the_number_of_workers(checkout: Path, root: Path) -> None:
    root.mkdir()
    deployed(checkout, "--root", str(root), "--workers", "5")
    assert workers_of(root) == 5
    assert "no longer wanted" not in deployed(checkout, "--root", str(root))
    assert workers_of(root) == 5
    deployed(checkout, "--root", str(root), "--upgrade")
    assert workers_of(root) == 5
    deployed(checkout, "--root", str(root), "--workers", "3")
    deployed(checkout, "--root", str(root))
    assert workers_of(root) == 3


@needs_systemd
def test_another_address_is_rejected_if_the_configuration_was_edited(checkout: Path, root: Path) -> None:
    root.mkdir()
    deployed(checkout, "--root", str(root), "--listen", "127.0.0.1:7001")
    config, kept = root / "etc/multigpu/config.toml", root / "etc/multigpu/deployed"
    config.write_text(config.read_text() + "# mine\n")
    before = everything_in(root)
    rejected = deploy(checkout, "--root", str(root), "--listen", "127.0.0.1:7002")
    assert rejected.returncode == 1
    assert 'set listen = "127.0.0.1:7002" there' in rejected.stderr
    assert everything_in(root) == before
    config.write_text(config.read_text().replace(":7001", ":7002"))
    deployed(checkout, "--root", str(root), "--listen", "127.0.0.1:7002")
    assert "listen=127.0.0.1:7002" in kept.read_text()


def keys(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a function of keys.sh with this checkout's mgpuctl."""
    called = " ".join(map(str, arguments))
    text = f'run() {{ "$@"; }}; . {ROOT}/tools/deploy/keys.sh; {called} {sys.executable} -m multigpu.cli'
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=400, check=True)


def test_the_keys_of_an_image_are_made_on_its_first_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certs, token = tmp_path / "certs", tmp_path / "worker.token"
    keys("make_certificates_in", certs, "0.0.0.0:7433")
    made = everything_in(certs)
    assert {f"{name}.{end}" for name in ("ca", "master", "worker", "client") for end in ("crt", "key")} <= set(made)
    assert (certs / "ca.key").stat().st_mode & 0o777 == 0o600
    keys("make_certificates_in", certs, "0.0.0.0:7433")
    again = everything_in(certs)
    assert [name for name in made if name.endswith(".crt") and again[name] != made[name]] == []
    flags = ["--require-tokens", "--tls-cert", str(certs / "master.crt"), "--tls-key", str(certs / "master.key")]
    fleet = Fleet(tmp_path, workers=0, master_flags=[*flags, "--tls-client-ca", str(certs / "ca.crt")])
    with contextlib.closing(fleet):
        fleet.start_master()
        monkeypatch.setenv("MGPU_MASTER", fleet.address)
        for name, file in {"CA": "ca.crt", "CERT": "client.crt", "KEY": "client.key"}.items():
            monkeypatch.setenv(f"MGPU_TLS_{name}", str(certs / file))
        monkeypatch.setenv("MGPU_TOKEN_FILE", str(fleet.data_dir / "admin.token"))
        keys("make_worker_token", token)
        text = token.read_text()
        assert text.startswith("mgpu_")
        keys("make_worker_token", token)
        assert token.read_text() == text


@pytest.mark.slow
@needs_systemd
def test_a_run_that_is_interrupted_anywhere_can_be_repeated(checkout: Path, tmp_path: Path, root: Path) -> None:
    """A run is killed after 1, 14 and 27 lines of output. The next run succeeds, with the files of a complete run."""
    peace = tmp_path / "peace"
    deployed(checkout, "--root", str(peace), "--listen", "0.0.0.0:7433")
    wanted = {name for name in everything_in(peace) if not name.endswith(".new")}
    command = [str(checkout / NAME), "--root", str(root), "--listen", "0.0.0.0:7433"]
    for lines in range(1, 40, 13):
        shutil.rmtree(root, ignore_errors=True)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, env=environment(checkout), start_new_session=True, **pipes) as process:
            assert process.stdout is not None
            for _ in range(lines):
                process.stdout.readline()
            os.killpg(process.pid, signal.SIGKILL)
            process.stdout.read()
        deployed(checkout, *command[1:])
        assert {name for name in everything_in(root) if not name.endswith(".new")} == wanted


@needs_systemd
def test_a_host_joins_the_fleet_of_another_host(
    checkout: Path, tmp_path: Path, root: Path, gpus: SimulatedGpus
) -> None:
    deployed(checkout, "--root", str(root), *joining(tmp_path / "credentials"), **gpus.env(), GPU_COUNT="2")
    units = {path.name for path in (root / "etc/systemd/system").iterdir()}
    assert "mgpu-master.service" not in units
    assert "mgpu-devices.service" in units
    config = (root / "etc/multigpu/config.toml").read_text()
    assert '[worker]\nmaster = "gpu1:7433"' in config
    assert "[master]" not in config
    assert (root / "etc/multigpu/worker.token").read_text() == "worker.token\n"


@needs_systemd
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_units_are_valid_and_hardened(checkout: Path, root: Path, gpus: SimulatedGpus) -> None:
    (root / "usr/lib").mkdir(parents=True)
    shutil.copytree("/usr/lib/systemd", root / "usr/lib/systemd", symlinks=True)
    for program in ("bin/kill", "bin/mkdir", "bin/sh", "usr/bin/env"):
        (root / program).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy("/bin/true", root / program)
    deployed(checkout, "--root", str(root), "--listen", "0.0.0.0:7433", **gpus.env())
    gpu = gpus.uuids[0]
    units = ["mgpu.target", "mgpu-master.service", f"mgpu-worker@{gpu}.service", f"mgpu-mps@{gpu}.service"]
    units += ["mgpu-gateway.service", "mgpu-certs.service", "mgpu-certs.timer", "mgpu-devices.service"]
    verify = subprocess.run(
        ["systemd-analyze", f"--root={root}", "verify", *units],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    ours = [line for line in verify.stderr.splitlines() if "mgpu" in line or "multigpu" in line]
    assert (verify.returncode, ours) == (0, []), verify.stderr
    for unit, threshold in (
        ("mgpu-master.service", 25),
        ("mgpu-gateway.service", 25),
        ("mgpu-worker@.service", 25),
        ("mgpu-mps@.service", 20),
    ):
        scored = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", f"--root={root}", f"--threshold={threshold}", unit],
            capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert scored.returncode == 0, scored.stdout.splitlines()[-1]
