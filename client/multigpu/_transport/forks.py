"""gRPC and fork: gRPC's core does not survive it.

In a child of a process that has used gRPC, the core's threads are gone, and locks that they held stay locked: using the
core there, and also freeing its objects, hangs or crashes. So in such a child every client raises ClientClosedError,
and inherited objects of gRPC are never freed. A fork before the first use does no harm.
"""

import ctypes
import os
import weakref

from multigpu.errors import ClientClosedError

# Objects that hold some of gRPC's.
_holders: "weakref.WeakSet[object]" = weakref.WeakSet()
_used = False
_lost = False


def lost() -> bool:
    """Whether this process was forked from one that had used gRPC."""
    return _lost


def check() -> None:
    """ClientClosedError: this process was forked from one that had used gRPC."""
    if _lost:
        raise ClientClosedError(
            "this process was forked from one that had used multigpu, and gRPC does not survive that: start processes "
            'with multiprocessing.get_context("spawn") or "forkserver", or make the first client after the fork'
        )


def holds(holder: object) -> None:
    """Registers an object that will hold some of gRPC's. Raises as `check`."""
    check()
    _holders.add(holder)


def uses() -> None:
    """To be called before gRPC is used. Raises as `check`."""
    global _used  # noqa: PLW0603  gRPC's core is one for the process
    check()
    _used = True


def _forked() -> None:
    global _lost  # noqa: PLW0603  as above
    if _used:
        _lost = True
        for holder in list(_holders):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))  # never freed, also not at exit


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forked)
