"""Tests import what they share as `tests.…`, however pytest was started. What one does to the log is undone."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

# A shell that starts a job in the background, and nohup, have it ignore SIGINT; so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@pytest.fixture(autouse=True)
def _log_by_default() -> Iterator[None]:
    """The simulator and the doors for hostile input hush the log of the whole process."""
    yield
    structlog.reset_defaults()
