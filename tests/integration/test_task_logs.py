"""What a handler writes with context().log stands with its task: while it runs, and in its outcome."""

from collections.abc import Iterator

import multigpu
import pytest
from multigpu import testing

from tests.fleet import Fleet, until
from tests.integration.handlers import logging_handlers

CHARS_MAX = 16_384


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The worker's log has the traceback that a handler writes, so `faults` is not asked."""
    with Fleet(tmp_path_factory.mktemp("fleet"), workers=1, handlers=["logging_handlers"]) as running:
        yield running


def ends_of(lines: list[str]) -> list[str]:
    """What comes after the time."""
    return [line.partition("Z attempt ")[2] for line in lines]


def test_lines_are_shown_while_the_task_runs_and_kept_with_its_outcome(fleet: Fleet) -> None:
    with fleet.client() as client:
        handle = client.submit("logs.steps", b"2.5")
        until(lambda: "INFO begins" in client.get(handle.id).log, what="the first line, with a heartbeat")
        running = client.get(handle.id)
        assert running.outcome is None
        first, *_ = running.log.splitlines()
        assert first.endswith("attempt 1 INFO begins with 3 bytes")
        outcome = handle.outcome()
        assert outcome.succeeded
        lines = outcome.log.splitlines()
        assert lines[0] == first
        assert lines[1].endswith("attempt 1 ERROR it went wrong")
        assert "Traceback (most recent call last):" in lines
        assert "ValueError: invalid literal for int() with base 10: 'the first time'" in lines
        assert ends_of(lines[-2:]) == ["2 INFO begins with 3 bytes", "2 WARNING ends"]
        assert "details" not in outcome.log
        until(lambda: client.get(handle.id).outcome is not None, what="the outcome on the disk")
        (listed,) = (task for task in client.list_tasks() if task.task_id == handle.id)
        assert listed.log == ""
    fleet.restart_master()
    fleet.wait_for_workers()
    with fleet.client() as client:
        assert client.get(handle.id).log == outcome.log


def test_only_the_last_lines_are_kept(fleet: Fleet) -> None:
    with fleet.client() as client:
        log = client.submit("logs.many", b"5000").outcome().log
    assert CHARS_MAX - 100 < len(log) <= CHARS_MAX
    first, *lines = log.splitlines()
    assert first == "…", "a sign that lines are missing"
    assert all("attempt 1 INFO line " in line for line in lines), "no line is cut"
    assert [int(line.split()[-3]) for line in lines] == list(range(5000 - len(lines), 5000))
    assert lines[-1].endswith("of ?"), "what UTF-8 can't encode is replaced"


def test_a_local_client_keeps_them_too() -> None:
    with testing.LocalClient() as client, pytest.MonkeyPatch.context() as patch:
        patch.setattr("logging.root.level", 20)
        outcome = client.submit(logging_handlers.steps.kind, b"0").outcome()
    assert isinstance(outcome, multigpu.Outcome)
    assert ends_of(outcome.log.splitlines()[-2:]) == ["2 INFO begins with 1 bytes", "2 WARNING ends"]
