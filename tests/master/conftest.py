"""Fixtures of the tests of the master."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from multigpu_master.journal.sqlite import journal as journal_sqlite

from tests.master.stage import Stage


@pytest.fixture
def sweeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeper runs at once, and often."""
    monkeypatch.setattr(journal_sqlite, "TICK_S", 0.02)
    monkeypatch.setattr(journal_sqlite, "SWEEP_AFTER_S", 0.0)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    made = Stage(tmp_path / "data")
    yield made
    made.journal.close(20)
