"""A short run of `python -m tests.fakes.mps_trial`."""

import pytest

from tests.fakes.mps_trial import run_trial


@pytest.mark.slow
async def test_no_client_is_killed_before_terminate_client_was_answered() -> None:
    # With this seed: a worker that stops during a fault, a run timeout, too little memory, and a cancellation.
    tally = await run_trial(runs=2, seed=2, first=399)
    assert (tally.violations, tally.wrong) == ([], [])
    assert tally.terminated > 0
    assert tally.faults > 0
