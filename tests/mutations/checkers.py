"""The checkers: functions that take a seed and raise if the product breaks a rule. They are imported by name, in the
process that applies the mutation, so that no module of the product is loaded before.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module

from tests.mutations.rules import pytest_checkers

# name -> (module, function, number of seeds for the unmutated product). 1: the function ignores the seed.
CHECKERS = {
    "client": ("tests.client.transport.test_run_state", "run_seed", 300),
    "full": ("tests.mutations.rules.journal_rules", "check_reserve", 1),
    "journal": ("tests.mutations.rules.journal_rules", "check", 30),
    "known": ("tests.mutations.rules.known", "check", 30),
    "models": ("tests.sim.models", "check", 100),
    "results": ("tests.hostile.lost_results", "check", 20),
    "session": ("tests.worker.session.test_session", "test_any_order_of_events_loses_and_repeats_nothing", 300),
    "simulator": ("tests.sim.sim", "check", 300),
    "gangs in seeds": ("tests.sim.sim", "check_gangs", 300),
}


def checker(name: str) -> Callable[[int], None]:
    """Imports a checker, and with it the part of the product that it tests. A name with "::" is that of a test."""
    if "::" in name:
        return partial(pytest_checkers.run_test, name)
    if name in pytest_checkers.TESTS_OF:
        return partial(pytest_checkers.check, name)
    module, function, _ = CHECKERS[name]
    found: Callable[[int], None] = getattr(import_module(module), function)
    return found


def baseline_seeds(name: str) -> int:
    return CHECKERS[name][2] if name in CHECKERS else 1


def seeds_of(name: str, seeds: int) -> int:
    """The number of seeds to run: at most one if the checker ignores its seed."""
    return min(seeds, 1) if baseline_seeds(name) == 1 else seeds
