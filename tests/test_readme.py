"""The README tells the truth: its Python and its commands are run against a real fleet."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from multigpu.cli import cli

from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
CLIENT_CODE, HANDLER_CODE, SCORES_CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """`mgpuctl up` with the README's handlers. Yields the environment that leads to it."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "my_handlers.py").write_text(HANDLER_CODE, "utf-8")
    ready = folder / "ready"
    env = {key: value for key, value in os.environ.items() if not key.startswith("MGPU_")}
    env["PYTHONPATH"] = str(folder)
    words = [
        "up",
        "--no-gateway",
        "--workers",
        "1",
        "--device",
        "cpu",
        "--listen",
        "127.0.0.1:0",
        "--handlers",
        "my_handlers",
    ]
    words += ["--data-dir", str(folder / "journal"), "--ready-file", str(ready)]
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen([sys.executable, "-m", "multigpu.cli", *words], env=env, stdout=log, stderr=log)
    try:
        until(lambda: ready.exists() or up.poll() is not None, 100, "mgpuctl up")
        assert up.poll() is None, (folder / "up.log").read_text("utf-8", errors="replace")
        address = ready.read_text("utf-8").split()[2].rstrip(",")
        yield env | {"MGPU_MASTER": address}
    finally:
        up.terminate()
        assert up.wait(timeout=60) == 0


@pytest.mark.slow
def test_the_python_example_runs(fleet: dict[str, str]) -> None:
    code = CLIENT_CODE.replace("1_000_000", "2_000")
    assert code != CLIENT_CODE
    done = subprocess.run(
        [sys.executable, "-c", code], env=fleet, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    likeness, echoed, fetched = done.stdout.splitlines()
    # What sentence-transformers gives for the two sentences; unlike ones are below 0.2.
    assert 0.4 < float(likeness) < 0.8
    assert (echoed, fetched) == ("b'hello'", "b'later'")


@pytest.mark.slow
@pytest.mark.parametrize("code", [CLIENT_CODE, SCORES_CODE], ids=["client", "scores"])
def test_a_type_checker_takes_the_python_example(code: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code, "utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "example.py"]
    env = {**os.environ, "MYPYPATH": str(ROOT / "client")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_handler_example_runs(fleet: dict[str, str]) -> None:
    (command,) = re.findall(r"^    mgpuctl (submit .*)$", README, re.MULTILINE)
    words = [sys.executable, "-m", "multigpu.cli", *shlex.split(command)]
    done = subprocess.run(words, env=fleet, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    (score,) = json.loads(done.stdout)
    assert isinstance(score, float)
    done = subprocess.run(
        [sys.executable, "-c", SCORES_CODE], env=fleet, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\d+ \[-?\d.*\]$", done.stdout, re.MULTILINE)) == 100
    assert "my_handlers.py" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("RuntimeError: ")


@pytest.mark.slow
def test_every_command_that_is_named_exists() -> None:
    named = set(re.findall(r"`mgpuctl ([a-z-]+(?: (?:list|get|set|show|explain|requeue)\b)?)", README))
    assert len(named) > 8
    for words in named:
        done = CliRunner().invoke(cli, [*words.split(), "--help"], prog_name="mgpuctl")
        assert done.exit_code == 0, done.output
        assert f"Usage: mgpuctl {words}" in done.output
