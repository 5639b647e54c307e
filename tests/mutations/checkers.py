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
    "batches": ("tests.mutations.batches", "check", ""),
    "cuts": ("tests.mutations.cuts", "check", ""),
    "stories": ("tests.mutations.stories", "check", ""),
    "models": ("tests.sim.models", "check", ""),
    "known": ("tests.mutations.known", "check", ""),
    "driver": ("tests.mutations.driver_rules", "check", ""),
    "transport": ("tests.mutations.transport", "check", ""),
    "results": ("tests.hostile.lost_results", "check", ""),
    "full": ("tests.mutations.journal_rules", "check_reserve", ""),
    "log": ("tests.mutations.log_rules", "check", ""),
    "journal": ("tests.mutations.journal_rules", "check", ""),
    "access": ("tests.mutations.stories", "access", ""),
    "stream": ("tests.client.test_run_stream", "run_seed", ""),
    "client": ("tests.client.test_run_state", "run_seed", ""),
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
