"""Attempts of tasks, as an engine gets and reports them. Workers and multigpu.testing.LocalClient use it."""

from dataclasses import dataclass
from typing import Protocol

CHECKPOINT_BYTES_MAX = 1 << 20
# Limits of the protocol: errors and progress notes (task.proto).
TYPE_BYTES_MAX = 256
MESSAGE_BYTES_MAX = 8 << 10
TRACEBACK_BYTES_MAX = 16 << 10
NOTE_BYTES_MAX = 1 << 10
LOG_CHARS_MAX = 16_384
CUT = "…\n"


@dataclass(slots=True)
class Item:
    """One attempt of one task."""

    lease_id: int
    task_id: int
    # From 1.
    attempt: int
    payload: bytes
    # The amount of work, in the kind's unit. At least 1.
    units: int
    # From the previous attempt. Empty: none.
    checkpoint: bytes
    # How many partial outputs of earlier attempts the master has. This attempt continues after them.
    partials_received: int
    # Those outputs, if they are at most 1 MiB together.
    partials: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Batch:
    """At least one item. All items share everything except their input."""

    kind: str
    # Empty: the worker's default for the kind.
    model: str
    parameters: dict[str, str]
    # The form of the payloads: empty for bytes, "application/json" for a JSON value.
    content_type: str
    items: list[Item]


class Reporter(Protocol):
    """Reports progress and results. Any thread may call it. Reports about settled or cancelled items are dropped."""

    def begin(self, item: Item) -> None:
        """Start the item's run timeout, and blame it if the process dies.

        Engines with `one_by_one` call it for each item, before any user code. In other engines all items have begun
        when `run` is called.
        """

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        """Settle the item with a result and its form."""

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        """Settle the item with the class of the error, and one paragraph for people, with a remedy if there is one."""

    def partial(self, item: Item, data: bytes, content_type: str = "") -> None:
        """Send the next partial output and its form."""

    def progress(self, item: Item, fraction: float, note: str = "") -> None:
        """Report the completed fraction, 0 to 1. Counts as a beat."""

    def log(self, item: Item, text: str) -> None:
        """Add lines, which end with a line break, to the log of the item's task."""

    def checkpoint(self, item: Item, data: bytes) -> None:
        """Save data for the next attempt, at most 1 MiB, else ValueError. Counts as a beat."""

    def cancelled(self, item: Item) -> bool:
        """Whether the item was cancelled. It may be skipped then, and need not be settled."""

    def beat(self) -> None:
        """Restart the progress timeout. Cheap: call it between steps."""


def text_of(text: str, bytes_max: int) -> str:
    """A text cut to `bytes_max`, without the lone surrogates that UTF-8 can't encode."""
    return text.encode("utf-8", "replace")[:bytes_max].decode("utf-8", "ignore")


def message_of(error: BaseException) -> str:
    """What an exception says; "" if nothing."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  user code too
        return "the exception can't say what it is: its __str__ raises"


def end_of(text: str, bytes_max: int) -> str:
    """As text_of, but the end of the text."""
    return text[-bytes_max:].encode("utf-8", "replace")[-bytes_max:].decode("utf-8", "ignore")


def last_lines(text: str) -> str:
    """The last lines of a task's log that fit into LOG_CHARS_MAX, after CUT if something is missing. Of a longer last
    line, the end.
    """
    if len(text) <= LOG_CHARS_MAX:
        return text
    kept = text[len(CUT) - LOG_CHARS_MAX :]
    lines = kept[kept.find("\n") + 1 :]
    # A part that was cut before it was added begins with CUT.
    return CUT + (lines or kept).removeprefix(CUT)
