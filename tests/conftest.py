"""Tests import what they share as `tests.…`, however pytest was started. What one does to the log is undone. What takes
the processors long is begun first.
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

# A shell that starts a job in the background, and nohup, have it ignore SIGINT; so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.ahead import Ahead

BEGUN = pytest.StashKey[dict[tuple[str, ...], Ahead]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        wanted = {mark.args for item in session.items for mark in item.iter_markers("ahead")}
        session.config.stash[BEGUN] = {arguments: Ahead(*arguments) for arguments in sorted(wanted)}


def pytest_unconfigure(config: pytest.Config) -> None:
    for begun in config.stash.get(BEGUN, {}).values():
        begun.close()


@pytest.fixture
def ahead(request: pytest.FixtureRequest) -> "subprocess.CompletedProcess[str]":
    """How the command of the test's mark `ahead` ended."""
    (mark,) = request.node.iter_markers("ahead")
    return request.config.stash[BEGUN][mark.args].ended()


@pytest.fixture(autouse=True)
def _log_by_default() -> Iterator[None]:
    """The simulator and the doors for hostile input hush the log of the whole process."""
    yield
    structlog.reset_defaults()
