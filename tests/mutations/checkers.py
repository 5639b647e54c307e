"""Who notices: functions of a seed that raise when a promise is broken. They are imported by name, in the process that
has the mutation, so that nothing of the product is loaded before.
"""

from collections.abc import Callable
from importlib import import_module

# name -> (module, what to call with a seed, what to call of what that gives)
CHECKERS = {
    "simulator": ("tests.sim.sim", "Simulation", "run"),
    "session": (
        "tests.worker.session.test_session",
        "test_any_order_of_events_loses_and_repeats_nothing",
        "",
    ),
    "batches": ("tests.mutations.rules.batches", "check", ""),
    "cuts": ("tests.mutations.rules.cuts", "check", ""),
    "stories": ("tests.mutations.rules.stories", "check", ""),
    "models": ("tests.sim.models", "check", ""),
    "known": ("tests.mutations.rules.known", "check", ""),
    "driver": ("tests.mutations.rules.driver_rules", "check", ""),
    "transport": ("tests.mutations.rules.transport", "check", ""),
    "results": ("tests.hostile.lost_results", "check", ""),
    "full": ("tests.mutations.rules.journal_rules", "check_reserve", ""),
    "journal": ("tests.mutations.rules.journal_rules", "check", ""),
    "access": ("tests.mutations.rules.stories", "access", ""),
    "stream": ("tests.client.transport.test_run_stream", "run_seed", ""),
    "client": ("tests.client.transport.test_run_state", "run_seed", ""),
}


def checker(name: str) -> Callable[[int], None]:
    """Loads a checker, and with it the part of the product that it watches."""
    module, function, method = CHECKERS[name]
    made = getattr(import_module(module), function)

    def check(seed: int) -> None:
        given = made(seed)
        if method:
            getattr(given, method)()

    return check
