"""Turns what the rooms behind the doors say into gRPC statuses."""

from typing import Any, NoReturn

import grpc

CURSOR_PREFIX = "v1."


async def refuse(context: Any, code: grpc.StatusCode, message: str) -> NoReturn:
    """Ends the call with a status."""
    await context.abort(code, message)
    raise AssertionError("abort does not return")


async def read_token(context: Any, token: str, what: str) -> int:
    """The number in a page token or cursor that we gave out; 0 for an empty one. INVALID_ARGUMENT: it isn't ours."""
    if not token:
        return 0
    number = token.removeprefix(CURSOR_PREFIX)
    if number == token or not number.isascii() or not number.isdigit() or len(number) > 18:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"{what} is not one that this service gave out")
    return int(number)


def make_token(number: int) -> str:
    """An opaque page token or cursor."""
    return f"{CURSOR_PREFIX}{number}"


async def page_size_of(context: Any, size: int) -> int:
    """The page size asked for. INVALID_ARGUMENT: out of range."""
    if not 0 <= size <= 1000:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, f"page_size is {size}; use 1 to 1000, or 0 for 100")
    return size or 100
