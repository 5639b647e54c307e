"""The fixture multigpu_fleet, in a pytest of its own that finds it by the entry point of pyproject.toml."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANDLERS = """
import os
import multigpu

@multigpu.handler("double")
def double(number: int) -> int:
    print("doubling", number)
    return 2 * number

@multigpu.handler("pid")
def pid(value: bytes) -> int:
    return os.getpid()
"""
TESTS = """
import time
import pytest
from pathlib import Path

import pytest

PIDS = Path(__file__).with_name("pids")

def test_with_the_handlers_of_the_ini_file(multigpu_fleet):
    client = multigpu_fleet.client(timeout=60)
    assert list(client.map("double", [1, 2])) == [2, 4]
    give_up = time.monotonic() + 20
    while "doubling 2" not in multigpu_fleet.log:  # a worker logs what handlers print a moment later
        assert time.monotonic() < give_up
    assert multigpu_fleet.address.startswith("127.0.0.1:")
    PIDS.write_text(str(client.run("pid", b"")))
    raise KeyError("fails, and still ends its processes")

@pytest.mark.multigpu_fleet(handlers=[], workers=2)
def test_with_a_marker(multigpu_fleet):
    import multigpu
    with multigpu_fleet.client(timeout=60) as client:
        assert client.run("echo", "same") == "same"
        with pytest.raises(multigpu.UnplaceableError):
            client.run("double", 1)
    with multigpu.AdminClient(multigpu_fleet.address, token="") as admin:
        assert len(list(admin.list_workers())) == 2

@pytest.mark.multigpu_fleet(handlers=["missing_module"])
def test_that_cannot_start(multigpu_fleet):
    pass
"""


def run_pytest(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    ((name, module),) = project["entry-points"]["pytest11"].items()
    info = folder / "entry" / "of_this_checkout-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: of-this-checkout\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[pytest11]\n{name} = {module}\n")
    paths = [str(folder / "entry"), *(str(ROOT / package) for package in ("client", "master", "worker"))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MGPU_TOKEN": "of another fleet"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--strict-markers", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_the_fixture_starts_fleets_and_ends_them(tmp_path: Path) -> None:
    (tmp_path / "my_handlers.py").write_text(HANDLERS)
    (tmp_path / "test_mine.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmultigpu_handlers = my_handlers\n")
    done = run_pytest(tmp_path)
    assert "1 failed, 1 passed, 1 error" in done.stdout, done.stdout + done.stderr
    assert "KeyError: 'fails, and still ends its processes'" in done.stdout
    assert "doubling 2" in done.stdout, "the log of a test that fails is shown"
    assert "the fleet ended before it was ready" in done.stdout
    assert "missing_module" in done.stdout
    assert not Path(f"/proc/{(tmp_path / 'pids').read_text()}").exists()


@pytest.mark.slow
def test_the_examples_of_the_page_pass(tmp_path: Path) -> None:
    page = (ROOT / "docs/testing.md").read_text("utf-8")
    names = ("my_handlers.py", "test_plain.py", "test_local.py", "test_fleet.py")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name, block in zip(names, blocks, strict=True):
        (tmp_path / name).write_text(block, "utf-8")
    (ini,) = re.findall(r"```ini\n(.*?)```", page, re.DOTALL)
    (tmp_path / "pytest.ini").write_text(ini, "utf-8")
    done = run_pytest(tmp_path)
    assert "6 passed" in done.stdout, done.stdout + done.stderr


def test_the_plugin_imports_nothing_heavy() -> None:
    heavy = {"grpc", "numpy", "google", "click"}
    code = f"import sys, multigpu.testing.pytest_plugin; print({heavy} & {{*sys.modules}})"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "client")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=400, check=True
    )
    assert done.stdout == "set()\n"
