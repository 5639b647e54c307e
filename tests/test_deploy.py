"""The deploy script's promises that need no installation: help, dry runs that do nothing, and clear refusals.

That it sets a bare machine up is tested by running it on one.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAME = "deploy_multi_gpu.sh"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script reads of a checkout, somewhere where a mistake hurts nobody."""
    for part in (NAME, "pyproject.toml", "examples"):
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, tmp_path / part)
    for part in ("client", "master", "worker"):
        (tmp_path / part).mkdir()
    return tmp_path


def deploy(checkout: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MGPU_")}
    return subprocess.run(
        [checkout / NAME, *arguments],
        env=environment | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def everything_in(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_dry_run_prints_every_action_and_does_none(checkout: Path) -> None:
    before = everything_in(checkout)
    done = deploy(checkout, "--local", "--dry-run", "--workers", "3")
    assert done.returncode == 0, done.stderr
    actions = [line for line in done.stdout.splitlines() if line.startswith("would run:")]
    words = ("-m venv", "pip install", "mgpuctl up --workers 3", "embed examples/sentences.txt", "-o")
    assert [word in action for word, action in zip(words, actions, strict=True)] == [True] * 5
    assert everything_in(checkout) == before


def test_the_environment_can_be_elsewhere(checkout: Path) -> None:
    done = deploy(checkout, "--local", "--dry-run", MGPU_VENV=str(checkout / "else where"))
    assert done.returncode == 0, done.stderr
    assert r"else\ where/bin/mgpuctl up" in done.stdout
    assert ".venv" not in done.stdout


def test_help_is_an_answer_and_nothing_is_a_mistake(checkout: Path) -> None:
    helped = deploy(checkout, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "--local" in helped.stdout
    silent = deploy(checkout)
    assert (silent.returncode, silent.stdout) == (2, "")
    assert silent.stderr == helped.stdout


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["--locl"], {}, "unknown argument: --locl"),
        (["--local", "--workers", "none"], {}, "--workers needs a whole number"),
        (["--local", "--workers"], {}, "--workers needs a number"),
        (["--local"], {"PYTHON": "no-such-python"}, "there is no no-such-python: install Python 3.11"),
    ],
)
def test_a_mistake_is_named_before_anything_is_done(
    checkout: Path, arguments: list[str], env: dict[str, str], message: str
) -> None:
    before = everything_in(checkout)
    done = deploy(checkout, *arguments, **env)
    assert done.returncode not in (0, 127)
    assert message in done.stderr
    assert everything_in(checkout) == before


def test_an_old_python_is_refused(checkout: Path) -> None:
    old = checkout / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.10.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = deploy(checkout, "--local", PYTHON=str(old))
    assert done.returncode == 1
    assert "Python 3.10.2 is too old" in done.stderr


def test_the_scripts_pass_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    scripts = [NAME, "tools/test.sh", ".ci/run"]
    done = subprocess.run([shellcheck, *scripts], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == ""
