"""The deploy script, run for real: dry runs that do nothing, refusals, services under a --root, a local fleet that is
upgraded under load.

One thing is a stand-in: the environment. Installing torch takes minutes, so `python -m venv` and `pip install` of these
tests make an environment that runs the Python and the multigpu of the test run. Nothing here is run by a real systemd
as process 1; what its tools say of the files is (`systemctl --root`, `systemd-analyze`, `systemd-sysusers`).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import multigpu
import pytest

from tests.fakes.gpus import SimulatedGpus
from tests.fleet import until

ROOT = Path(__file__).resolve().parent.parent
NAME = "deploy_multi_gpu.sh"
PARTS = (NAME, "pyproject.toml", "examples", "tools/deploy", "systemd")
needs_systemd = pytest.mark.skipif(shutil.which("systemctl") is None, reason="systemd's tools are not installed")
OLD_NAMES = ("GPU_COUNT", "PRIMARY_GPU_ID", "SECONDARY_GPU_IDS", "WORKER_COUNT", "MEMORY_THRESHOLD")
STAND_IN = """#!/bin/bash
# A stand-in for Python's venv and pip, for the tests of the deploy script: see tests/test_deploy.py.
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip")
    [ "$3" = --version ] && exit 0
    for program in mgpuctl mgpu-master mgpu-worker; do
      echo "#!$(dirname "$0")/python" >"$(dirname "$0")/$program"
      echo "import multigpu.cli; multigpu.cli.main()" >>"$(dirname "$0")/$program"
      chmod 755 "$(dirname "$0")/$program"
    done
    echo "stand-in for pip: ${*:3}"
    ;;
  "- ") exit 1 ;; # whether it is a developer's: no
  *) exec PYTHON "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script reads of a checkout, somewhere where a mistake hurts nobody."""
    home = tmp_path / "checkout"
    home.mkdir()
    for part in PARTS:
        target = home / part
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, target)
    for part in ("client", "master", "worker", "docs"):
        (home / part).mkdir()
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.replace("PYTHON", sys.executable))
    stand_in.chmod(0o755)
    return home


def environment(checkout: Path, **env: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MGPU_", "MULTI_GPU_")) and k not in OLD_NAMES}
    return clean | {"PYTHON": str(checkout.parent / "python")} | env


def deploy(checkout: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / NAME, *arguments],
        env=environment(checkout, **env),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def deployed(checkout: Path, *arguments: str, **env: str) -> str:
    done = deploy(checkout, *arguments, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def everything_in(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    return SimulatedGpus(tmp_path / "gpus", n=8)


# Words and refusals.


def test_a_dry_run_prints_every_action_and_does_none(checkout: Path) -> None:
    before = everything_in(checkout)
    out = deployed(checkout, "--local", "--dry-run", "--workers", "3")
    actions = [line for line in out.splitlines() if line.startswith("would run:")]
    words = ("-m venv", "pip install", "mgpuctl up --workers 3", "embed examples/sentences.txt", "-o")
    assert [word in action for word, action in zip(words, actions, strict=True)] == [True] * 5
    assert everything_in(checkout) == before


def test_the_environment_can_be_elsewhere(checkout: Path) -> None:
    out = deployed(checkout, "--local", "--dry-run", MGPU_VENV=str(checkout / "else where"))
    assert r"else\ where/bin/mgpuctl up" in out
    assert ".venv" not in out


def test_help_is_an_answer(checkout: Path) -> None:
    helped = deploy(checkout, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    for word in ("--local", "--join", "--upgrade", "--uninstall", "--status", "--dry-run", "--workers", "--keep"):
        assert word in helped.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["--locl"], {}, "unknown argument: --locl"),
        (["--local", "--workers", "none"], {}, "--workers needs a whole number"),
        (["--local", "--workers"], {}, "--workers needs a number"),
        (["--local"], {"PYTHON": "no-such-python"}, "there is no no-such-python: install Python 3.11"),
        (["--local", "--join", "a:1"], {}, "are for services, not for --local"),
        (["--status", "--upgrade"], {}, "one at a time"),
        (["--root", "{root}", "--join", "gpu1:7433"], {}, "--join needs --credentials DIR"),
        (["--root", "{root}", "--join", "gpu1"], {}, "an address is HOST:PORT"),
        (["--root", "{root}", "--upgrade"], {}, "nothing is deployed yet"),
        (["--local"], {"GPU_COUNT": "two"}, "GPU_COUNT is a whole number"),
        (["--local"], {"PRIMARY_GPU_ID": "7"}, "there is no GPU '7'"),
        (["--local"], {"LOAD_BALANCING_STRATEGY": "luck"}, "there is no strategy 'luck'"),
        (["--local"], {"ENABLE_MPS": "perhaps"}, "ENABLE_MPS is true or false"),
        (["--local"], {"MEMORY_THRESHOLD": "much"}, "MEMORY_THRESHOLD is a percentage"),
        (
            ["--local"],
            {"LOAD_BALANCING_STRATEGY": "round_robin", "MULTI_GPU_STRATEGY": "memory"},
            "contradict each other",
        ),
    ],
)
def test_a_mistake_is_named_before_anything_is_done(
    checkout: Path, tmp_path: Path, arguments: list[str], env: dict[str, str], message: str
) -> None:
    before = everything_in(checkout)
    root = tmp_path / "root"
    done = deploy(checkout, *(argument.format(root=root) for argument in arguments), **env)
    assert done.returncode not in (0, 127)
    assert message in done.stderr
    assert everything_in(checkout) == before
    assert not root.exists()


def test_an_old_python_is_refused(checkout: Path) -> None:
    old = checkout / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.10.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = deploy(checkout, "--local", PYTHON=str(old))
    assert done.returncode == 1
    assert "Python 3.10.2 is too old" in done.stderr


def test_the_scripts_pass_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    scripts = [NAME, "tools/test.sh", ".ci/run", *map(str, (ROOT / "tools/deploy").glob("*.sh"))]
    command = [shellcheck, "-x", *scripts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""


# Which GPUs, which settings.


@pytest.mark.parametrize(
    ("env", "indices"),
    [
        ({}, range(8)),
        ({"GPU_COUNT": "0"}, range(8)),
        ({"GPU_COUNT": "3"}, range(3)),
        ({"PRIMARY_GPU_ID": "5"}, (5, 0, 1, 2, 3, 4, 6, 7)),
        ({"PRIMARY_GPU_ID": "5", "GPU_COUNT": "2"}, (5, 0)),
        ({"PRIMARY_GPU_ID": "5", "SECONDARY_GPU_IDS": "6, 7"}, (5, 6, 7)),
        ({"SECONDARY_GPU_IDS": "3"}, (0, 3)),
        ({"MULTI_GPU_DEVICE_IDS": "2,4"}, (2, 4)),
        ({"MULTI_GPU_ENABLED": "false"}, (0,)),
        ({"MULTI_GPU_ENABLED": "true"}, range(8)),
    ],
)
def test_which_gpus_get_a_worker(
    checkout: Path, gpus: SimulatedGpus, env: dict[str, str], indices: Iterator[int]
) -> None:
    """The part of the script that chooses, alone: it asks the simulated nvidia-smi."""
    words = "set -euo pipefail; . tools/deploy/common.sh; . tools/deploy/machine.sh; gpu_uuids=() gpu_names=() workers="
    command = ["bash", "-c", f'{words}; detect_gpus; choose_devices; echo "${{chosen[*]}}"']
    variables = environment(checkout, **gpus.env(), **env)
    done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [gpus.uuids[index] for index in indices]


@needs_systemd
def test_each_gpu_gets_a_worker_and_an_mps_daemon(checkout: Path, tmp_path: Path, gpus: SimulatedGpus) -> None:
    out = deployed(checkout, "--root", str(tmp_path / "root"), "--dry-run", **gpus.env())
    assert f"{len(gpus)} found (Simulated" in out
    (enable,) = (line for line in out.splitlines() if " enable " in line)
    assert [word[12:-8] for word in enable.split() if word.startswith("mgpu-worker@")] == gpus.uuids
    assert [word[9:-8] for word in enable.split() if word.startswith("mgpu-mps@")] in ([], gpus.uuids)


@needs_systemd
def test_old_variables_become_settings(checkout: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    old = {
        "LOAD_BALANCING_STRATEGY": "static_partition",
        "MEMORY_THRESHOLD": "72.5",
        "ENABLE_MPS": "false",
        "ENABLE_TF32": "true",
        "ENABLE_NVLINK": "false",
        "WORKER_COUNT": "3",
        "MULTI_GPU_STATS_FILE": "/var/log/multigpu/gpu.jsonl",
        "MULTI_GPU_STATS_INTERVAL": "30",
    }
    deployed(checkout, "--root", str(root), **old)
    config = root / "etc/multigpu/config.toml"
    shown = subprocess.run(
        [sys.executable, "-m", "multigpu.cli", "--config", config, "config", "show", "--json"],
        env=environment(checkout), capture_output=True, text=True, timeout=30, check=True,
    ).stdout  # fmt: skip
    for name in ("static_partition", "72.5", '"off"', "/var/log/multigpu/gpu.jsonl", "30"):
        assert name in shown
    words = (root / "etc/multigpu/multigpu.env").read_text().splitlines()
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1" in words
    assert "NCCL_P2P_DISABLE=1" in words
    wanted = sorted(path.name for path in (root / "etc/systemd/system/mgpu.target.wants").iterdir())
    assert wanted == ["mgpu-master.service", *(f"mgpu-worker@cpu-{n}.service" for n in range(3))]


# Services, under a --root.


@needs_systemd
def test_services_are_deployed_once_and_leave_nothing(checkout: Path, tmp_path: Path, gpus: SimulatedGpus) -> None:
    root = tmp_path / "root"
    root.mkdir()
    arguments = ("--root", str(root), "--listen", "0.0.0.0:7433")
    dry = deployed(checkout, *arguments, "--dry-run", **gpus.env())
    assert not everything_in(root)
    first = deployed(checkout, *arguments, **gpus.env())
    # What a dry run says is what is done.
    wrote = {line.split()[1] for line in first.splitlines() if line.startswith("    wrote ")}
    assert wrote == {line.split()[2] for line in dry.splitlines() if line.startswith("would write: ")}
    assert wrote

    before = everything_in(root)
    again = deployed(checkout, *arguments, **gpus.env())
    assert "wrote" not in again
    after = everything_in(root)
    touched = {name for name in before if before[name] != after.get(name)}
    # systemd's tools write their databases again.
    assert {
        n for n in touched if not n.startswith(("etc/passwd", "etc/group", "etc/shadow", "etc/gshadow", "etc"))
    } == set()
    assert after.keys() == before.keys()

    for name in ("ca.crt", "ca.key", "master.crt", "master.key", "worker.crt", "worker.key", "client.crt"):
        assert (root / "etc/multigpu/certs" / name).exists()
    assert (root / "etc/multigpu/certs/ca.key").stat().st_mode & 0o777 == 0o600
    assert "multigpu:" in (root / "etc/passwd").read_text()
    state = subprocess.run(
        ["systemctl", f"--root={root}", "is-enabled", "mgpu.target", f"mgpu-worker@{gpus.uuids[7]}.service"],
        capture_output=True, text=True, timeout=30, check=False,
    ).stdout  # fmt: skip
    assert state.split() == ["enabled", "enabled"]
    config = (root / "etc/multigpu/config.toml").read_text()
    assert "require_tokens = true" in config

    # An operator's edit stays; fewer GPUs are fewer workers.
    (root / "etc/multigpu/config.toml").write_text(config + "# mine\n")
    edited = deployed(checkout, *arguments, **gpus.env(), GPU_COUNT="2")
    assert "kept:" in edited
    assert (root / "etc/multigpu/config.toml").read_text().endswith("# mine\n")
    wants = root / "etc/systemd/system/mgpu.target.wants"
    assert len([path for path in wants.iterdir() if path.name.startswith("mgpu-worker@")]) == 2

    asked = deploy(checkout, "--root", str(root), "--uninstall")
    assert asked.returncode == 1
    assert "asks before it removes" in asked.stderr
    deployed(checkout, "--root", str(root), "--uninstall", "--yes")
    left = [name for name in everything_in(root) if "multigpu" in name or "mgpu" in name]
    assert left == []
    assert "multigpu:" not in (root / "etc/passwd").read_text()


@needs_systemd
def test_interrupted_anywhere_it_can_be_run_again(checkout: Path, tmp_path: Path) -> None:
    """Killed after 1, 2, 3 … of its outputs: the next run completes, and the result is that of a run in peace."""
    peace = tmp_path / "peace"
    deployed(checkout, "--root", str(peace), "--listen", "0.0.0.0:7433")
    wanted = {name for name in everything_in(peace) if not name.endswith(".new")}
    root = tmp_path / "root"
    command = [str(checkout / NAME), "--root", str(root), "--listen", "0.0.0.0:7433"]
    for lines in range(1, 40, 13):
        shutil.rmtree(root, ignore_errors=True)
        with subprocess.Popen(
            command,
            env=environment(checkout),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            for _ in range(lines):
                process.stdout.readline()
            os.killpg(process.pid, signal.SIGKILL)
            process.stdout.read()
        deployed(checkout, *command[1:])
        assert {name for name in everything_in(root) if not name.endswith(".new")} == wanted


@needs_systemd
def test_a_host_joins_a_fleet_elsewhere(checkout: Path, tmp_path: Path, gpus: SimulatedGpus) -> None:
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    for name in ("ca.crt", "worker.crt", "worker.key", "worker.token"):
        (credentials / name).write_text(f"{name}\n")
    root = tmp_path / "root"
    arguments = ("--root", str(root), "--join", "gpu1:7433", "--credentials", str(credentials))
    deployed(checkout, *arguments, **gpus.env(), GPU_COUNT="2")
    units = {path.name for path in (root / "etc/systemd/system").iterdir()}
    assert "mgpu-master.service" not in units
    config = (root / "etc/multigpu/config.toml").read_text()
    assert '[worker]\nmaster = "gpu1:7433"' in config
    assert "[master]" not in config
    assert (root / "etc/multigpu/worker.token").read_text() == "worker.token\n"


# The units.


@needs_systemd
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_units_are_clean_and_hardened(checkout: Path, tmp_path: Path, gpus: SimulatedGpus) -> None:
    root = tmp_path / "root"
    (root / "usr/lib").mkdir(parents=True)
    shutil.copytree("/usr/lib/systemd", root / "usr/lib/systemd", symlinks=True)
    for program in ("bin/kill", "bin/mkdir", "bin/sh", "usr/bin/env"):
        (root / program).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy("/bin/true", root / program)
    deployed(checkout, "--root", str(root), "--listen", "0.0.0.0:7433", **gpus.env())
    gpu = gpus.uuids[0]
    units = ["mgpu.target", "mgpu-master.service", f"mgpu-worker@{gpu}.service", f"mgpu-mps@{gpu}.service"]
    units += ["mgpu-certs.service", "mgpu-certs.timer"]
    verify = subprocess.run(
        ["systemd-analyze", f"--root={root}", "verify", *units], capture_output=True, text=True, timeout=60, check=False
    )
    ours = [line for line in verify.stderr.splitlines() if "mgpu" in line or "multigpu" in line]
    assert (verify.returncode, ours) == (0, []), verify.stderr
    for unit, threshold in (("mgpu-master.service", 25), ("mgpu-worker@.service", 25), ("mgpu-mps@.service", 20)):
        scored = subprocess.run(
            ["systemd-analyze", "security", "--offline=true", f"--root={root}", f"--threshold={threshold}", unit],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert scored.returncode == 0, scored.stdout.splitlines()[-1]


# A local fleet.


def test_a_local_fleet_is_upgraded_under_load(checkout: Path) -> None:
    """Clients keep submitting while master and workers are replaced: every task has its one outcome."""
    venv = checkout / ".venv"
    try:
        deployed(checkout, "--local", "--keep", "--workers", "2", "--", "--listen", "127.0.0.1:0", "--device", "cpu")
        again = deployed(checkout, "--local", "--keep")
        assert "runs already" in again
        address = (checkout / ".local/fleet/ready").read_text().split()[2].rstrip(",")
        workers = pids_of(address)
        assert len(workers) == 2
        results: list[bytes] = []
        stop = threading.Event()
        failures: list[BaseException] = []

        def load() -> None:
            try:
                with multigpu.Client(address) as client:
                    number = 0
                    while not stop.is_set():
                        batch = [f"{number + k}".encode() for k in range(50)]
                        results.extend(client.map("echo", batch))
                        number += 50
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=load)
        thread.start()
        try:
            until(lambda: len(results) > 100)
            (checkout / "client/changed.py").write_text("# another version\n")
            upgraded = deployed(checkout, "--local", "--upgrade")
            at_the_end = len(results)
            until(lambda: len(results) > at_the_end + 100)
        finally:
            stop.set()
            thread.join(60)
        assert not failures
        assert "stand-in for pip: install" in upgraded
        assert "2 workers replaced" in upgraded
        assert results == [f"{number}".encode() for number in range(len(results))]
        replaced = pids_of(address)
        assert replaced.keys() == workers.keys()
        assert not set(replaced.values()) & set(workers.values())
        assert "2 active" in deployed(checkout, "--local", "--status")
    finally:
        deployed(checkout, "--local", "--stop")
    assert deploy(checkout, "--local", "--status").returncode == 3
    deployed(checkout, "--local", "--uninstall", "--yes")
    assert not venv.exists()
    assert not (checkout / ".local").exists()


def pids_of(address: str) -> dict[str, int]:
    """Of the active workers, by name."""
    command = [sys.executable, "-m", "multigpu.cli", "--master", address, "workers", "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout)
    return {worker["worker_id"]: worker["pid"] for worker in told if worker["state"] == "ACTIVE"}


def test_a_local_fleet_has_a_worker_for_each_gpu(checkout: Path, gpus: SimulatedGpus) -> None:
    """On the simulated driver: two of its eight GPUs, to be quick; tests/gpu_host has all."""
    try:
        deployed(
            checkout, "--local", "--keep", "--", "--listen", "127.0.0.1:0", **gpus.env(), MULTI_GPU_DEVICE_IDS="1,6"
        )
        address = (checkout / ".local/fleet/ready").read_text().split()[2].rstrip(",")
        assert sorted(name.partition("-")[2] for name in pids_of(address)) == sorted([gpus.uuids[1], gpus.uuids[6]])
    finally:
        deployed(checkout, "--local", "--stop")
