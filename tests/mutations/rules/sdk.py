"""Tests of the SDK, of settings and of model repositories as checkers, a few files each."""

from collections.abc import Callable

from tests.mutations.rules.pytest_checkers import run_tests


def _checker(*paths: str) -> Callable[[int], None]:
    return lambda _seed: run_tests(paths)


CALLS = "client/calls"
calls = _checker(*(f"{CALLS}/test_{name}.py" for name in ("run", "submit", "embed", "inference", "generate_client")))
maps = _checker(f"{CALLS}/test_map.py", f"{CALLS}/test_timeouts.py")
threads = _checker(f"{CALLS}/test_client.py")
reconnect = _checker("client/transport/test_reconnect.py", "client/transport/test_window.py", f"{CALLS}/test_watch.py")
config = _checker("client/test_config.py")
telemetry = _checker("client/test_telemetry.py")
repository = _checker("client/repository")
credentials = _checker("security/test_listeners.py")
