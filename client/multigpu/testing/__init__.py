"""Tests of programs and handlers: `LocalClient` runs the handlers of this process, without master and workers.

pytest has the fixture `multigpu_fleet` besides, a real master and workers (pytest_plugin.py). docs/testing.md has
examples.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigpu.testing.clients import AsyncLocalClient as AsyncLocalClient
    from multigpu.testing.clients import LocalClient as LocalClient

__all__ = ["AsyncLocalClient", "LocalClient"]


def __getattr__(name: str) -> Any:
    # pytest imports this package in every run, for its plugin: the clients would import gRPC.
    if name not in __all__:
        raise AttributeError(f"module 'multigpu.testing' has no attribute {name!r}")
    return getattr(importlib.import_module("multigpu.testing.clients"), name)
