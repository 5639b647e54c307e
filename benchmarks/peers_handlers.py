"""The peers' own task bodies as our handlers: every system runs the very same functions. Served by our workers'
engines; `tasks` is found in the peers' folder, by PYTHONPATH.
"""

import importlib
from typing import Any

from multigpu.handlers import handler

tasks: Any = importlib.import_module("tasks")


@handler("peers.noop")
def noop(payload: bytes) -> Any:
    return tasks.noop(payload)


@handler("peers.sleep")
def sleep(payload: bytes) -> Any:
    return tasks.sleep(payload)
