"""Page sizes, page tokens and cursors, and limits of items in one call."""

from collections.abc import Sequence
from typing import Any, TypeVar

from multigpu_master.errors import InvalidArgumentError

T = TypeVar("T")

PAGE_PREFIX = "p."
CURSOR_PREFIX = "w."  # a Watch cursor is w.INCARNATION.NUMBER
PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX = 100, 1000


def parse_page_token(token: str, name: str, prefix: str = PAGE_PREFIX) -> int:
    """Returns the number in a page token, 0 if it is empty. Raises InvalidArgumentError if the token is not valid."""
    number = token.removeprefix(prefix)
    if token and (number == token or not number.isascii() or not number.isdigit() or len(number) > 18):
        raise InvalidArgumentError(f"this service did not issue the {name}")
    return int(number or 0)


def make_page_token(number: int) -> str:
    """An opaque page token."""
    return f"{PAGE_PREFIX}{number}"


def make_cursor(incarnation: str, number: int) -> str:
    """An opaque Watch cursor."""
    return f"{CURSOR_PREFIX}{incarnation}.{number}"


def read_cursor(cursor: str) -> tuple[str, int]:
    """Returns the incarnation that issued a Watch cursor, and the cursor's number; ("", 0) if the cursor is empty.
    Raises InvalidArgumentError if it is not valid.
    """
    incarnation, _, _ = cursor.removeprefix(CURSOR_PREFIX).partition(".")
    return incarnation, parse_page_token(cursor, "cursor", f"{CURSOR_PREFIX}{incarnation}.")


def check_count(count: int, limit: int, items: str, advice: str = "") -> None:
    """Raises InvalidArgumentError if there are too many items: to serve them in one call would delay other calls."""
    if count > limit:
        raise InvalidArgumentError(f"{count} {items}; at most {limit} are allowed" + (f": {advice}" if advice else ""))


def read_page_size(size: int) -> int:
    """Returns the number of items on a page. Raises InvalidArgumentError if `size` is out of range."""
    if not 0 <= size <= PAGE_SIZE_MAX:
        raise InvalidArgumentError(f"page_size is {size}; use 1 to {PAGE_SIZE_MAX}, or 0 for {PAGE_SIZE_DEFAULT}")
    return size or PAGE_SIZE_DEFAULT


def page_of(items: Sequence[T], request: Any) -> tuple[Sequence[T], str]:
    """The page that a List request asks for, and the token of the next page."""
    size, start = read_page_size(request.page_size), parse_page_token(request.page_token, "page_token")
    end = start + size
    return items[start:end], make_page_token(end) if end < len(items) else ""
