"""The stacks of a test process that crashes, in a pytest of its own that has the hooks of these tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = """
import os
import subprocess
import sys

def test_runs_a_pytest_itself():
    subprocess.run([sys.executable, "-m", "pytest", "--collect-only", __file__], check=True)

def test_crashes():
    os.abort()
"""


def test_the_stacks_of_a_crash_are_in_the_summary(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "--max-worker-restart", "0"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "gw0 crashed" in done.stdout, done.stdout + done.stderr
    assert f'File "{tmp_path}/test_it.py", line 10 in test_crashes' in done.stdout
    assert "1 failed, 1 passed" in done.stdout
