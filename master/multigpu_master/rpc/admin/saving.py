"""Saves what administrative calls change."""

from collections.abc import Mapping, Sequence

from multigpu_master.driver import Driver
from multigpu_master.errors import ExhaustedError, JournalError


async def save(driver: Driver, settings: Mapping[str, bytes | None], deleted_dead_letters: Sequence[int] = ()) -> None:
    """Returns when the settings and deletions are synced. Raises ExhaustedError if they may not survive a restart."""
    try:
        await driver.write_buffer.save(dict(settings), deleted_dead_letters)
    except JournalError as error:
        raise ExhaustedError(f"the change was made, but may not survive a restart of the master: {error}") from None
