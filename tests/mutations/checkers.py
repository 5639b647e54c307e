"""Who notices: functions of a seed that raise when a promise is broken. They are imported by name, in the process that
has the mutation, so that nothing of the product is loaded before.
"""

from collections.abc import Callable
from importlib import import_module

# name -> (module, what to call with a seed, what to call of what that gives)
CHECKERS = {
    "simulator": ("tests.sim.sim", "Simulation", "run"),
    "session": ("tests.worker.test_session", "test_any_order_of_events_loses_nothing_and_says_nothing_twice", ""),
    "batches": ("tests.mutations.batches", "check", ""),
    "stories": ("tests.mutations.stories", "check", ""),
    "models": ("tests.sim.models", "check", ""),
    "known": ("tests.mutations.known", "check", ""),
    "journal": ("tests.mutations.journal_rules", "check", ""),
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
