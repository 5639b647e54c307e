"""The deploy script: dry runs, errors, and the GPUs and settings that it chooses."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.deployment import NAME, ROOT, deploy, deployed, environment, everything_in, needs_systemd
from tests.fakes.gpus import SimulatedGpus

LOCKED = "--only-binary :all: --require-hashes"
# What is done in turn to make an environment on a host without a GPU.
INSTALLED = (
    "pip uninstall -qq --yes torch onnxruntime onnxruntime-gpu",
    "--no-deps --find-links https://download.pytorch.org/whl/cpu/torch/ -r tools/deploy/lock/cpu-torch.txt",
    f"{LOCKED} -r tools/deploy/lock/cpu.txt",
    "--no-deps --no-build-isolation .",
    "pip check",
)


def test_a_dry_run_prints_every_action_and_does_none(checkout: Path) -> None:
    before = everything_in(checkout)
    out = deployed(checkout, "--local", "--dry-run", "--workers", "3")
    actions = [line for line in out.splitlines() if line.startswith("would run:")]
    words = ("-m venv", *INSTALLED, "mgpuctl up --workers 3", "embed examples/sentences.txt", "-o")
    assert [word in action for word, action in zip(words, actions, strict=True)] == [True] * len(words)
    assert everything_in(checkout) == before


def test_the_environment_can_have_another_path(checkout: Path) -> None:
    out = deployed(checkout, "--local", "--dry-run", MGPU_VENV=str(checkout / "else where"))
    assert r"else\ where/bin/mgpuctl up" in out
    assert ".venv" not in out


def test_help_succeeds(checkout: Path) -> None:
    helped = deploy(checkout, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    for word in ("--local", "--join", "--upgrade", "--rollback", "--uninstall", "--status", "--dry-run", "--workers"):
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
        (["--root", "{root}", "--rollback"], {}, "there is no former release"),
        (["--local", "--rollback"], {}, "--rollback is for services"),
        (["--local"], {"GPU_COUNT": "two"}, "GPU_COUNT is a whole number"),
        (["--local"], {"PRIMARY_GPU_ID": "7"}, "there is no GPU '7'"),
        (["--local"], {"LOAD_BALANCING_STRATEGY": "luck"}, "there is no strategy 'luck'"),
        (["--local"], {"ENABLE_MPS": "perhaps"}, "ENABLE_MPS is true or false"),
        (["--local"], {"MEMORY_THRESHOLD": "much"}, "MEMORY_THRESHOLD is a percentage"),
        (["--local"], {"LOAD_BALANCING_STRATEGY": "round_robin", "MULTI_GPU_STRATEGY": "memory"}, "contradict each"),
    ],
)
def test_errors_are_reported_before_anything_is_done(
    checkout: Path, root: Path, arguments: list[str], env: dict[str, str], message: str
) -> None:
    before = everything_in(checkout)
    done = deploy(checkout, *(argument.format(root=root) for argument in arguments), **env)
    assert done.returncode not in (0, 127)
    assert message in done.stderr
    assert everything_in(checkout) == before
    assert not root.exists()


@pytest.mark.parametrize(
    ("version", "check", "message"),
    [("3.10.2", "< (3, 11)", "too old"), ("3.15.0", ">= (3, 15)", "newer than the lock")],
)
def test_a_python_that_the_lock_does_not_support_is_rejected(
    checkout: Path, version: str, check: str, message: str
) -> None:
    other = checkout / "other-python"
    other.write_text(f'#!/bin/sh\ncase "$*" in --version) echo "Python {version}" ;; *"{check}"*) exit 1 ;; esac\n')
    other.chmod(0o755)
    done = deploy(checkout, "--local", PYTHON=str(other))
    assert done.returncode == 1
    assert f"Python {version} is {message}" in done.stderr


def test_the_scripts_pass_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    scripts = [NAME, "tools/test.sh", ".ci/run", *map(str, (ROOT / "tools/deploy").glob("*.sh"))]
    command = [shellcheck, "-x", *scripts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout == ""


@pytest.mark.slow
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
def test_the_gpus_that_get_a_worker(
    checkout: Path, gpus: SimulatedGpus, env: dict[str, str], indices: Iterator[int]
) -> None:
    """Only the part of the script that chooses, with the simulated nvidia-smi."""
    words = "set -euo pipefail; . tools/deploy/common.sh; . tools/deploy/machine.sh; gpu_uuids=() gpu_names=() workers="
    command = ["bash", "-c", f'{words}; detect_gpus; choose_devices; echo "${{chosen[*]}}"']
    variables = environment(checkout, **gpus.env(), **env)
    done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=400, check=True)
    assert done.stdout.split() == [gpus.uuids[index] for index in indices]


@pytest.mark.slow
@needs_systemd
@pytest.mark.parametrize("driver", ["525.60.13", "550.163.01", "575.57.08", "580.65.06", "610.1"])
def test_the_build_of_torch_fits_the_driver(checkout: Path, root: Path, gpus: SimulatedGpus, driver: str) -> None:
    profile = "cuda13" if driver >= "580" else "cuda12"
    gpus.set_driver(driver)
    out = deployed(checkout, "--root", str(root), "--dry-run", **gpus.env())
    installs = [line.partition(" -m ")[2].strip() for line in out.splitlines() if "-m pip" in line]
    # Nothing without a hash, and one of the two of ONNX Runtime: which, tests/deploy/test_lock.py tells.
    assert ["--require-hashes" in line or "--no-deps" in line for line in installs if " install " in line] == [True] * 2
    assert installs[0].endswith("--yes torch onnxruntime onnxruntime-gpu")
    assert installs[1].endswith(f"{LOCKED} -r tools/deploy/lock/{profile}.txt")


@needs_systemd
def test_a_driver_that_is_too_old_for_torch_is_rejected(checkout: Path, root: Path, gpus: SimulatedGpus) -> None:
    gpus.set_driver("470.256.02")
    done = deploy(checkout, "--root", str(root), **gpus.env())
    assert (done.returncode, "driver 470.256.02 is too old for CUDA 12" in done.stderr) == (1, True)
    assert not (root).exists()


@needs_systemd
def test_each_gpu_gets_a_worker_and_an_mps_daemon(checkout: Path, root: Path, gpus: SimulatedGpus) -> None:
    env = gpus.env()
    env["PATH"] = f"{ROOT / 'tests/fakes/mps_control'}:{env['PATH']}"
    out = deployed(checkout, "--root", str(root), "--workers", str(len(gpus) + 1), **env)
    assert f"{len(gpus)} found (Simulated" in out
    enabled = [path.name for path in (root / "etc/systemd/system").glob("*.wants/*")]
    second = f"{gpus.uuids[0]}-1"
    assert {name[12:-8] for name in enabled if name.startswith("mgpu-worker@")} == {*gpus.uuids, second}
    assert sorted(name[9:-8] for name in enabled if name.startswith("mgpu-mps@")) == sorted(gpus.uuids)
    drop_in = root / f"etc/systemd/system/mgpu-worker@{second}.service.d/50-name.conf"
    assert f"[Unit]\nAfter=mgpu-mps@{gpus.uuids[0]}.service\n" in drop_in.read_text()


@needs_systemd
def test_old_variables_become_settings(checkout: Path, root: Path) -> None:
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
