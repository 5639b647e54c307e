"""Fixtures of the tests of the journal."""

import pytest
from multigpu_master.journal.sqlite import journal as journal_sqlite


@pytest.fixture
def sweeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweeper runs at once, and often."""
    monkeypatch.setattr(journal_sqlite, "TICK_S", 0.02)
    monkeypatch.setattr(journal_sqlite, "SWEEP_AFTER_S", 0.0)
