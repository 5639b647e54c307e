"""The checkers: functions that take a seed and raise if the product breaks a rule. They are imported by name, in the
process that applies the mutation, so that no module of the product is loaded before.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module

# name -> (module, function, number of seeds for the unmutated product). 1: the function ignores the seed.
CHECKERS = {
    "access": ("tests.mutations.rules.pytest_checkers", "access", 1),
    "batches": ("tests.mutations.rules.batches", "check", 300),
    "client": ("tests.client.transport.test_run_state", "run_seed", 300),
    "cuts": ("tests.mutations.rules.cuts", "check", 300),
    "driver": ("tests.mutations.rules.driver_rules", "check", 1),
    "full": ("tests.mutations.rules.journal_rules", "check_reserve", 1),
    "journal": ("tests.mutations.rules.journal_rules", "check", 30),
    "known": ("tests.mutations.rules.known", "check", 30),
    "log": ("tests.mutations.rules.log_rules", "check", 10),
    "models": ("tests.sim.models", "check", 100),
    "calls": ("tests.mutations.rules.sdk", "calls", 1),
    "config": ("tests.mutations.rules.sdk", "config", 1),
    "credentials": ("tests.mutations.rules.sdk", "credentials", 1),
    "maps": ("tests.mutations.rules.sdk", "maps", 1),
    "reconnect": ("tests.mutations.rules.sdk", "reconnect", 1),
    "repository": ("tests.mutations.rules.sdk", "repository", 1),
    "telemetry": ("tests.mutations.rules.sdk", "telemetry", 1),
    "threads": ("tests.mutations.rules.sdk", "threads", 1),
    "results": ("tests.hostile.lost_results", "check", 20),
    "session": ("tests.worker.session.test_session", "test_any_order_of_events_loses_and_repeats_nothing", 300),
    "simulator": ("tests.sim.sim", "check", 300),
    "store": ("tests.mutations.rules.pytest_checkers", "store", 1),
    "pytest": ("tests.mutations.rules.pytest_checkers", "check", 1),
    "stream": ("tests.client.transport.test_run_stream", "run_seed", 20),
    "transport": ("tests.mutations.rules.transport", "check", 1),
    "arrays": ("tests.mutations.rules.engines", "arrays", 1),
    "artifacts": ("tests.mutations.rules.engines", "artifacts", 1),
    "content": ("tests.mutations.rules.engines", "content", 1),
    "gates": ("tests.mutations.rules.engines", "gates", 1),
    "plans": ("tests.mutations.rules.engines", "plans", 1),
    "tokens": ("tests.mutations.rules.engines", "tokens", 1),
    "vectors": ("tests.mutations.rules.engines", "vectors", 1),
    "worker": ("tests.mutations.rules.pytest_checkers", "worker", 1),
}


def checker(name: str) -> Callable[[int], None]:
    """Imports a checker, and with it the part of the product that it tests. A name with "::" is that of a test."""
    if "::" in name:
        from tests.mutations.rules.pytest_checkers import run_test

        return partial(run_test, name)
    module, function, _ = CHECKERS[name]
    found: Callable[[int], None] = getattr(import_module(module), function)
    return found


def seeds_of(name: str, seeds: int) -> int:
    """The number of seeds to run: at most one if the checker ignores its seed."""
    return min(seeds, 1) if "::" in name or CHECKERS[name][2] == 1 else seeds
