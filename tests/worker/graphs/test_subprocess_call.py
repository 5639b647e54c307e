"""Calls in a child process: errors are raised in the caller, and the child ends with its parent."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from multigpu_worker.engines.common.subprocess_call import subprocess_call
from multigpu_worker.repository.folders import ModelFolderError


def test_errors_of_the_subprocess_are_raised() -> None:
    assert subprocess_call("json:dumps", {"obj": 1}) == "1"
    with pytest.raises(ModelFolderError, match=r"json:loads: TypeError: .*missing"):
        subprocess_call("json:loads", {})
    with pytest.raises(ModelFolderError, match="docs/dependencies"):
        subprocess_call("no_such_module:any", {})
    with pytest.raises(FileNotFoundError, match="no-such-folder"):
        subprocess_call("os:listdir", {"path": "/no-such-folder"})
    with pytest.raises(ModelFolderError, match="exit status -6"):
        subprocess_call("os:abort", {})


def test_subprocess_dies_with_its_parent() -> None:
    code = "from multigpu_worker.engines.common import subprocess_call as s; s.subprocess_call('signal:pause', {})"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.05)
        parent.kill()
    while is_alive(int(found[0])):
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
