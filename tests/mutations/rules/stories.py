"""The stories of one rule each as a checker: for rules that the seeds meet too seldom, or only in large worlds."""

from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
STORIES = (
    "core", "scenarios", "master/test_ids.py", "master/journal/test_journaling.py", "worker/session/test_session.py",
    "worker/session/test_batcher.py", "worker/device/test_health.py",
    "master/test_wire_devices.py",
    "master/journal/test_journal_full.py::test_without_a_descriptor_it_rejects_and_goes_on",
    "master/journal/test_journal_lost_log.py::test_a_deleted_log_is_reported_and_salvage_goes_on_without_it",
    "master/test_driver.py::test_count_counts_each_task_once_while_tasks_settle",
    "master/test_driver.py::test_a_cancellation_without_room_changes_nothing",
)  # fmt: skip


class _Failed:
    """Notes which test failed first."""

    def __init__(self) -> None:
        self.test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid.rpartition("/")[2]


# Runs every command of mgpuctl on a fleet: only for the mutations that need it.
ACCESS = ("security/test_cli_access.py",)


def check(_seed: int) -> None:
    """AssertionError: a story went otherwise; its name."""
    run(STORIES)


def access(_seed: int) -> None:
    """The same, of the settings that every command of mgpuctl takes."""
    run(ACCESS)


def run(stories: tuple[str, ...]) -> None:
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
    code = pytest.main([*arguments, *[str(TESTS / story) for story in stories]], plugins=[noted])
    assert code == pytest.ExitCode.OK, noted.test or f"pytest ended with {code}"
