"""gRPC and fork: gRPC's core does not survive it.

In a child of a process that has used gRPC, the core's threads are gone and its locks may be held by them: whatever
touches it there hangs or crashes, freeing its objects too. So in such a child every client refuses to work, and what
was inherited of gRPC is never freed. A process that forks before its first use has nothing to lose.
"""

import ctypes
import os
import weakref

from multigpu.errors import ClientClosedError

# What holds gRPC's objects.
_holders: "weakref.WeakSet[object]" = weakref.WeakSet()
_used = False
_lost = False


def lost() -> bool:
    """Whether this process was forked from one that had used gRPC."""
    return _lost


def check() -> None:
    """ClientClosedError: it was."""
    if _lost:
        raise ClientClosedError(
            "this process was forked from one that had used multigpu, and gRPC does not survive that: start processes "
            'with multiprocessing.get_context("spawn") or "forkserver", or make the first client after the fork'
        )


def holds(holder: object) -> None:
    """Tells of an object that will hold some of gRPC's. Raises as `check`."""
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
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))  # also at exit it is not freed


os.register_at_fork(after_in_child=_forked)
