"""The short form of the trial: `python -m tests.fakes.mps_trial --runs 200` is the long one."""

import pytest

from tests.fakes.mps_trial import run_trial


@pytest.mark.timeout(240)
async def test_no_client_is_killed_before_terminate_client_was_answered() -> None:
    # A worker that stops beside a fault, and a run timeout; then memory, and a cancellation.
    tally = await run_trial(runs=2, seed=2, first=399)
    assert tally.violations == []
    assert tally.wrong == []
    assert tally.terminated > 0
    assert tally.faults > 0
