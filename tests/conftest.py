"""Makes `tests` importable however pytest was started, and resets the log configuration after each test."""

import faulthandler
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import structlog
from hypothesis import HealthCheck, settings

# Shells that start a background job, and nohup, make it ignore SIGINT, and so all processes that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several tests run at once: OpenMP's threads of one test, which spin while they wait, would keep the cores from others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nor should the trials of engines, each with an export, that workers run beside their first tasks (tests of them do).
os.environ.setdefault("MGPU_WORKER_ENGINE", "torch")

# How long an example takes depends on what else runs.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
_BEGIN_S = time.monotonic()
_CRASHES = pytest.StashKey[Path]()
_CRASH = pytest.StashKey[IO[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked slow too")
    parser.addoption(
        "--slow-minutes", type=float, default=math.inf, help="skip what is slow and has not begun after so many minutes"
    )


@pytest.hookimpl(trylast=True)  # after pytest's own plugin, which writes to stderr, where many processes write
def pytest_configure(config: pytest.Config) -> None:
    """Where tests run in several processes, keeps the stacks of one that crashes for the summary."""
    worker: dict[str, str] | None = getattr(config, "workerinput", None)
    if worker is None:
        if config.getoption("numprocesses", None):
            config.stash[_CRASHES] = Path(tempfile.mkdtemp(prefix="tests-crashes-"))
            os.environ["TESTS_CRASHES"] = str(config.stash[_CRASHES])
    elif folder := os.environ.get("TESTS_CRASHES"):
        config.stash[_CRASH] = (Path(folder) / worker["workerid"]).open("w")
        faulthandler.enable(config.stash[_CRASH])


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CRASH in config.stash:
        faulthandler.enable()
        config.stash[_CRASH].close()
    elif _CRASHES in config.stash:  # not in a pytest that a test runs: it has the variable of the environment too
        shutil.rmtree(config.stash[_CRASHES], ignore_errors=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _CRASHES in config.stash:
        for path in sorted(config.stash[_CRASHES].iterdir()):
            if stacks := path.read_text():
                terminalreporter.section(f"{path.name} crashed")
                terminalreporter.write(stacks)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--slow-minutes")
    if item.get_closest_marker("slow") and time.monotonic() - _BEGIN_S > 60 * minutes:
        pytest.skip(f"not begun within --slow-minutes {minutes:g}: this host is too slow for all tests")


@pytest.fixture(autouse=True)
def _log_by_default() -> Iterator[None]:
    """The simulator and the hostile suite silence the log of the whole process. Programs that click runs in the process
    send it to a stream of their test's: the interpreter has crashed in a write to one after the test.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)
