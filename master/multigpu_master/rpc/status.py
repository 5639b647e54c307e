"""Turns what the rooms behind the doors say into gRPC statuses."""

from typing import Any, NoReturn

import grpc

CURSOR_PREFIX = "v1."
# Of a Watch cursor: the name of the incarnation that gave it out follows. Those without a name gave out v1.
NAMED_PREFIX = "v2."
# A status travels in a header, which is rejected as a whole by the other end if it is long. The remedy is at the end.
DETAILS_CHARS_MAX = 2000


async def reject(context: Any, code: grpc.StatusCode, message: str) -> NoReturn:
    """Ends the call with a status. Of a message that quotes too much the middle is left out."""
    if len(message) > DETAILS_CHARS_MAX:
        half = DETAILS_CHARS_MAX // 2
        message = f"{message[:half]} … {message[-half:]}"
    await context.abort(code, message)
    raise AssertionError("abort does not return")


async def read_token(context: Any, token: str, what: str) -> int:
    """The number in a page token or cursor that we gave out; 0 for an empty one. INVALID_ARGUMENT: it isn't ours."""
    if not token:
        return 0
    number = token.removeprefix(CURSOR_PREFIX)
    if number == token or not number.isascii() or not number.isdigit() or len(number) > 18:
        await reject(context, grpc.StatusCode.INVALID_ARGUMENT, f"{what} is not one that this service gave out")
    return int(number)


def make_token(number: int) -> str:
    """An opaque page token or cursor."""
    return f"{CURSOR_PREFIX}{number}"


def make_cursor(incarnation: str, number: int) -> str:
    """An opaque Watch cursor."""
    return f"{NAMED_PREFIX}{incarnation}.{number}"


async def read_cursor(context: Any, cursor: str) -> tuple[str, int]:
    """The incarnation that gave out a Watch cursor, and its number. INVALID_ARGUMENT: it isn't ours."""
    name, dot, number = cursor.removeprefix(NAMED_PREFIX).partition(".")
    if not (cursor.startswith(NAMED_PREFIX) and dot):
        return "", await read_token(context, cursor, "cursor")
    return name, await read_token(context, CURSOR_PREFIX + number, "cursor")


async def count_of(context: Any, count: int, limit: int, what: str) -> None:
    """INVALID_ARGUMENT: there are more in one call than are good for those who call at the same time."""
    if count > limit:
        await reject(
            context, grpc.StatusCode.INVALID_ARGUMENT, f"{count} {what}; at most {limit} are allowed: send several"
        )


async def page_size_of(context: Any, size: int) -> int:
    """The page size asked for. INVALID_ARGUMENT: out of range."""
    if not 0 <= size <= 1000:
        await reject(context, grpc.StatusCode.INVALID_ARGUMENT, f"page_size is {size}; use 1 to 1000, or 0 for 100")
    return size or 100
