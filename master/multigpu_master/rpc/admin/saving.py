"""Settings saved by administrative calls."""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from multigpu_master.driver import Driver
from multigpu_master.journal.protocol import JournalError
from multigpu_master.rpc.status import reject


async def save(
    driver: Driver, context: Any, settings: Mapping[str, bytes | None], deleted_dead_letters: Sequence[int] = ()
) -> None:
    """Returns once the settings and deletions are synced. RESOURCE_EXHAUSTED: they cannot be."""
    try:
        await driver.journaling.save(dict(settings), deleted_dead_letters)
    except JournalError as error:
        await reject(
            context,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"done, but it may not survive a restart of the master: {error}",
        )
