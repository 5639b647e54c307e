"""The handler of the disk trials: no two executions have the same result, so no outcome can pass for another."""

import secrets

from multigpu.handlers import handler


@handler("disk.unique")
def unique(value: bytes) -> bytes:
    """The payload, behind a number that no other execution gives."""
    return secrets.token_hex(8).encode() + b":" + value
