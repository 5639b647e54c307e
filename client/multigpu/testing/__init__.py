"""Tests of programs and handlers: `LocalClient` runs the handlers of this process, without master and workers.

pytest has the fixture `multigpu_fleet` besides, a real master and workers (pytest_plugin.py). docs/testing.md has
examples.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multigpu.testing.clients import AsyncLocalClient as AsyncLocalClient
    from multigpu.testing.clients import LocalClient as LocalClient
    from multigpu.testing.pytest_plugin import Fleet as Fleet

_LAZY = {"AsyncLocalClient": "clients", "Fleet": "pytest_plugin", "LocalClient": "clients"}
__all__ = sorted(_LAZY)  # noqa: PLE0605  a list of str, which sorted() returns


def __getattr__(name: str) -> Any:
    # pytest imports this package in every run, for its plugin: the clients would import gRPC.
    if name not in _LAZY:
        raise AttributeError(f"module 'multigpu.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"multigpu.testing.{_LAZY[name]}"), name)
