"""Runs the deploy script in a copy of the checkout.

The Python environment is a stand-in: installing torch takes minutes, so `python -m venv` and `pip install` of these
tests make an environment that runs the Python and the multigpu of the test run. No service is started by systemd; its
tools check the files (`systemctl --root`, `systemd-analyze`, `systemd-sysusers`).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "deploy_multi_gpu.sh"
PARTS = (NAME, "pyproject.toml", "examples", "tools/deploy", "systemd")
needs_systemd = pytest.mark.skipif(shutil.which("systemctl") is None, reason="systemd's tools are not installed")
OLD_NAMES = ("GPU_COUNT", "PRIMARY_GPU_ID", "SECONDARY_GPU_IDS", "WORKER_COUNT", "MEMORY_THRESHOLD")
STAND_IN = """#!/bin/bash
# A stand-in for Python's venv and pip, for the tests of the deploy script: see tests/deploy/deployment.py.
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip")
    [ "$3" = --version ] && exit 0
    for program in mgpuctl mgpu-master mgpu-worker mgpu-gateway; do
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
    """A copy of the files that the script reads."""
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
    options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    command = [str(checkout / NAME), *arguments]
    return subprocess.run(command, env=environment(checkout, **env), timeout=400, check=False, **options)


def deployed(checkout: Path, *arguments: str, **env: str) -> str:
    done = deploy(checkout, *arguments, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def joining(credentials: Path) -> tuple[str, ...]:
    """The words with which a host joins another's fleet, with credentials that it writes there."""
    credentials.mkdir()
    for name in ("ca.crt", "worker.crt", "worker.key", "worker.token"):
        (credentials / name).write_text(f"{name}\n")
    return "--join", "gpu1:7433", "--credentials", str(credentials)


def everything_in(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}
