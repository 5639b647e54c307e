"""Rejected calls, page tokens and cursors."""

from typing import Any, NoReturn

import grpc

PAGE_PREFIX = "v1."
# Of a Watch cursor; the name of the incarnation that issued it follows. Cursors without a name are page tokens.
CURSOR_PREFIX = "v2."
# Clients reject a status as a whole if its header is too long.
DETAILS_CHARS_MAX = 2000
PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX = 100, 1000


async def reject(context: Any, code: grpc.StatusCode, message: str) -> NoReturn:
    """Ends the call with a status. A long message is cut in the middle: the remedy is at its end."""
    if len(message) > DETAILS_CHARS_MAX:
        half = DETAILS_CHARS_MAX // 2
        message = f"{message[:half]} … {message[-half:]}"
    await context.abort(code, message)
    raise AssertionError("abort does not return")


async def read_token(context: Any, token: str, name: str) -> int:
    """The number in a page token or cursor; 0 for an empty one. INVALID_ARGUMENT: this service did not issue it."""
    if not token:
        return 0
    number = token.removeprefix(PAGE_PREFIX)
    if number == token or not number.isascii() or not number.isdigit() or len(number) > 18:
        await reject(context, grpc.StatusCode.INVALID_ARGUMENT, f"{name} is not one that this service gave out")
    return int(number)


def make_token(number: int) -> str:
    """An opaque page token."""
    return f"{PAGE_PREFIX}{number}"


def make_cursor(incarnation: str, number: int) -> str:
    """An opaque Watch cursor."""
    return f"{CURSOR_PREFIX}{incarnation}.{number}"


async def read_cursor(context: Any, cursor: str) -> tuple[str, int]:
    """The incarnation that issued a Watch cursor, and its number. INVALID_ARGUMENT: this service did not issue it."""
    name, dot, number = cursor.removeprefix(CURSOR_PREFIX).partition(".")
    if not (cursor.startswith(CURSOR_PREFIX) and dot):
        return "", await read_token(context, cursor, "cursor")
    return name, await read_token(context, PAGE_PREFIX + number, "cursor")


async def check_count(context: Any, count: int, limit: int, items: str) -> None:
    """INVALID_ARGUMENT: the call holds more items than may be served without delaying other calls."""
    if count > limit:
        await reject(
            context, grpc.StatusCode.INVALID_ARGUMENT, f"{count} {items}; at most {limit} are allowed: send several"
        )


async def read_page_size(context: Any, size: int) -> int:
    """The number of items on a page. INVALID_ARGUMENT: out of range."""
    if not 0 <= size <= PAGE_SIZE_MAX:
        text = f"page_size is {size}; use 1 to {PAGE_SIZE_MAX}, or 0 for {PAGE_SIZE_DEFAULT}"
        await reject(context, grpc.StatusCode.INVALID_ARGUMENT, text)
    return size or PAGE_SIZE_DEFAULT
