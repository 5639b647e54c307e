"""The peers' task bodies as our handlers, so that every system runs the same functions.

`tasks` is found in the peers' folder, by PYTHONPATH.
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
