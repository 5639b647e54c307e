"""The failpoints name functions that are there, and one that is passed ends its process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.failpoints import FAILPOINTS, Failpoint, variable
from tests.chaos.processes import ROOT
from tests.chaos.records.history import load


@pytest.mark.parametrize("point", FAILPOINTS, ids=lambda point: point.name)
def test_the_function_of_a_failpoint_is_there(point: Failpoint) -> None:
    owner, name = point.owner()
    assert callable(getattr(owner, name))


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_process_ends_at_the_call_that_was_asked_for(side: str, tmp_path: Path) -> None:
    point = next(p for p in FAILPOINTS if p.name == f"fsync of a segment, {side}")
    record = tmp_path / "failpoint-1.jsonl"
    program = """
import os, sys
from tests.chaos import failpoints
failpoints.arm(failpoints.MASTER)
for call in range(3):
    os.fdatasync(1)
    print(call, flush=True)
"""
    with (tmp_path / "output").open("w") as output:
        argv = [sys.executable, "-c", program]
        env = {**os.environ, **variable(point, 2, record)}
        code = subprocess.run(argv, env=env, cwd=ROOT, stdout=output, timeout=30, check=False).returncode
        again = subprocess.run(argv, env=env, cwd=ROOT, stdout=output, timeout=30, check=False).returncode
    assert (code, again) == (-signal.SIGKILL, 0), "once, and never again"
    assert (tmp_path / "output").read_text().split() == ["0", "0", "1", "2"]
    assert [r["name"] for r in load(tmp_path)] == [point.name]
