"""The fleet of tests/gateway/openai_api, and environments with a library whose pins conflict with ours."""

import json
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.openai_api.conftest import fleet as fleet  # noqa: PLC0414  a fixture, as those below
from tests.gateway.openai_api.conftest import judge as judge  # noqa: PLC0414
from tests.gateway.openai_api.conftest import tiny as tiny  # noqa: PLC0414

PROGRAMS = Path(__file__).parent / "programs"
# Runs a program with these arguments, JSON values; returns the JSON value that it prints.
Program = Callable[..., Any]


def program(folder: Path, name: str, *requirements: str) -> Program:
    """A program of PROGRAMS in an environment of its own. Skips the test if pip can't reach an index."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--no-input"]
    quick = ["--retries", "1", "--timeout", "20"]
    probe = [*pip, "download", "--quiet", "--no-deps", "--dest", str(folder), *quick, "typing-extensions"]
    reached = subprocess.run(probe, capture_output=True, text=True, timeout=200, check=False)
    if reached.returncode != 0:
        pytest.skip(f"no package index answers: {reached.stderr.strip().splitlines()[-1]}")
    install = [*pip, "install", "--quiet", *requirements]
    done = subprocess.run(install, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr

    def run(*arguments: Any) -> Any:
        command = [str(python), "-I", str(PROGRAMS / f"{name}.py"), *map(json.dumps, arguments)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    return run
