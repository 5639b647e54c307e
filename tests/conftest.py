"""Makes `tests` importable however pytest was started, and resets the log configuration after each test."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

# Shells that start a background job, and nohup, make it ignore SIGINT, and so all processes that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several tests run at once: OpenMP's threads of one test, which spin while they wait, would keep the cores from others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)


@pytest.fixture(autouse=True)
def _log_by_default() -> Iterator[None]:
    """The simulator and the hostile suite silence the log of the whole process."""
    yield
    structlog.reset_defaults()
