"""The stories of one rule each as a checker: for rules that the seeds meet too seldom, or only in large worlds."""

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
STORIES = (
    "core", "scenarios", "master/test_journaling.py", "worker/test_session.py", "worker/test_batcher.py",
    "worker/test_health.py",
)  # fmt: skip


class _Failed:
    """Notes which test failed first."""

    def __init__(self) -> None:
        self.test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid.rpartition("/")[2]


def check(_seed: int) -> None:
    """AssertionError: a story went otherwise; its name."""
    noted = _Failed()
    arguments = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(TESTS.parent),
        "-c",
        str(TESTS.parent / "pyproject.toml"),
    ]
    code = pytest.main([*arguments, *[str(TESTS / story) for story in STORIES]], plugins=[noted])
    assert code == pytest.ExitCode.OK, noted.test or f"pytest ended with {code}"
