"""Pytest tests as checkers: for rules that random seeds break too rarely, or only in large simulations."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.mutations.mutation import planted

TESTS = Path(__file__).resolve().parents[2]
# Checker -> files and tests.
TESTS_OF = {
    "pytest": (
        "core", "scenarios", "master/test_ids.py", "master/telemetry/test_latencies.py", "master/test_wire_devices.py",
        "master/test_wire_outcomes.py", "master/journal/test_write_buffer.py",
        "worker/session/test_session.py", "worker/session/test_batcher.py", "worker/device/test_health.py",
        "master/journal/test_journal_full.py::test_without_a_descriptor_it_rejects_and_goes_on",
        "master/journal/test_journal_lost_log.py::test_a_deleted_log_is_reported_and_salvage_goes_on_without_it",
        "master/test_driver.py::test_count_counts_each_task_once_while_tasks_settle",
        "master/test_driver.py::test_a_cancellation_without_room_changes_nothing",
    ),
    "gangs": ("core/test_gangs.py", "core/test_elastic_gangs.py"),
    "batcher": ("worker/session/test_batcher.py",),
    "store": (
        "master/test_driver.py", "master/test_clock.py", "master/telemetry/test_latencies.py",
        "master/test_wire_devices.py",
        "master/test_wire_outcomes.py", "disk/test_damage.py",
        "master/journal/test_journal_expiry.py", "master/journal/test_shared_payloads.py",
        "master/journal/test_backup.py::test_no_master_starts_from_a_backup_that_was_broken_off",
    ),
}  # fmt: skip
# Imported by each Python process that a test starts.
PLANT = """
import sys
sys.path.append({root!r})
from tests.mutations.listed import MUTATIONS
from tests.mutations.mutation import plant
plant(next(m for m in MUTATIONS if m.breaks == {breaks!r}))
"""


class _Failed:
    """The first test that failed."""

    test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid.rpartition("/")[2]


def is_missing(name: str) -> bool:
    """Whether there is no such test. pytest would fail, as if the test had noticed the mutation."""
    file, _, test = name.partition("::")
    return f"def {test.partition('[')[0]}(" not in (TESTS / file).read_text()


def check(name: str, _seed: int) -> None:
    """AssertionError: one of the tests of this checker failed; names it."""
    run_tests(TESTS_OF[name])


def run_test(name: str, _seed: int) -> None:
    """The same for one test, which may be slow. The daemons that it starts have the mutation of this process."""
    mutation = planted()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if mutation is not None:
            (Path(folder) / "sitecustomize.py").write_text(PLANT.format(root=str(TESTS.parent), breaks=mutation.breaks))
            patch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
        run_tests((name,), "--all")


def run_tests(tests: tuple[str, ...], *more: str) -> None:
    failed, root = _Failed(), TESTS.parent
    options = f"-x -q -p no:cacheprovider --rootdir {root} -c {root / 'pyproject.toml'}".split()
    code = pytest.main([*options, *more, *[str(TESTS / test) for test in tests]], plugins=[failed])
    assert code == pytest.ExitCode.OK, failed.test or f"pytest ended with {code}"
