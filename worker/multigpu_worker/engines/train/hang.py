"""Notices that no rank of a job makes progress, and says where each of them is.

The ranks' engines share a counter in the job's store, which each raises when its script has written or reported
something. So no clocks are compared, and all engines see the end of progress within a second or two.
"""

import itertools
import re
import time
from pathlib import PurePath
from typing import Any

# How often the counter is read.
LOOK_S = 1.0
# How long a rank waits for all others to notice, and then for where they are.
NOTICE_S, GATHER_S = 5.0, 10.0
_POLL_S = 0.05


class HangWatch:
    """`store`: of this run, of all ranks. `limit_s`: without progress."""

    def __init__(self, store: Any, limit_s: float) -> None:
        self._store = store
        self._limit_s = limit_s
        self._progressed = False
        self._count = -1
        self._changed_s = self._looked_s = time.monotonic()

    def progress(self) -> None:
        """Call when the rank's script has written or reported something."""
        self._progressed = True

    def hangs(self) -> bool:
        """Whether no rank has made progress for too long. Cheap: looks once a second."""
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return False
        if now - self._looked_s > 3 * LOOK_S:
            self._changed_s += now - self._looked_s  # this process was suspended, and perhaps its script with it
        self._looked_s = now
        count = self._store.add("progress", int(self._progressed))
        self._progressed = False
        if count != self._count:
            self._count, self._changed_s = count, now
        return now - self._changed_s >= self._limit_s


def await_notice(store: Any, rank: int, world_size: int) -> None:
    """Waits until all ranks have noticed: a script that is ended earlier lets the others fail, for another reason."""
    store.set(f"noticed/{rank}", "")
    _await(store, [f"noticed/{each}" for each in range(world_size)], time.monotonic() + NOTICE_S)


def tell_place(store: Any, rank: int, place: str) -> None:
    """Tells rank 0 where this rank is: when it hangs, and when it has ended."""
    store.set(f"place/{rank}", place)


def have_places(store: Any, world_size: int) -> bool:
    """Whether all ranks have told where they are."""
    return bool(store.check([f"place/{rank}" for rank in range(world_size)]))


def places(store: Any, world_size: int) -> list[str]:
    """Where the ranks are; of those that don't say so in time, that."""
    end_s, found = time.monotonic() + GATHER_S, []
    for rank in range(world_size):
        known = _await(store, [f"place/{rank}"], end_s)
        found.append(store.get(f"place/{rank}").decode() if known else "does not say where it is")
    return found


def _await(store: Any, keys: list[str], end_s: float) -> bool:
    """Whether the store has the keys before that time."""
    while not store.check(keys):
        if time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)
    return True


def place_of(errors: list[str]) -> str:
    """Where a script is, by the stack that Python's faulthandler has written for the signal that ended it; or, if it
    was ending because of another rank's end, by its traceback.
    """
    frames = _frames(errors, "Current thread ")
    if all(library for _, _, library in frames):
        frames = (
            _frames([_PREFIX.sub("", line) for line in errors], "Traceback (most recent call last)")[::-1] or frames
        )
    if not frames:
        return "has left no stack"
    own = next((f"at {where} in {function}" for where, function, library in frames if not library), "")
    if not frames[0][2]:  # or in a function of C that it has called
        return f"is {own}"
    inner = next((function for _, function, library in frames if library and function not in _WRAPPERS), "")
    return f"waits in {inner} {own}".rstrip()


# What torch puts before the lines of a traceback.
_PREFIX = re.compile(r"^\[rank\d+\]: ?")
# Functions of torch that only call another one.
_WRAPPERS = frozenset({"wrapper", "_wrapped_call_impl", "_call_impl", "wait"})


def _frames(lines: list[str], begin: str) -> list[tuple[str, str, bool]]:
    """The frames of the last stack that begins with such a line."""
    begins = [index for index, line in enumerate(lines) if line.startswith(begin)]
    after = itertools.takewhile(lambda line: line.startswith(" "), lines[begins[-1] + 1 :] if begins else ())
    return [_frame(line) for line in after if line.startswith('  File "')]


def _frame(line: str) -> tuple[str, str, bool]:
    """Of `File "/x/train.py", line 3 in main`: "train.py line 3", "main", and whether it is of a library. A traceback
    has a comma after the number.
    """
    file, _, rest = line.removeprefix('  File "').partition('", line ')
    number, _, function = rest.replace(", in ", " in ").partition(" in ")
    library = "/site-packages/" in file or "/dist-packages/" in file or file.startswith("<") or "/lib/python" in file
    return f"{PurePath(file).name} line {number}", function, library
