"""A rule of the request_id filter: `WriteBuffer` never takes a settled request_id for a new one, before, while and
after it reads the known ones from the journal.

Uses the real `WriteBuffer`, the real journal in a temporary directory, and a real event loop.
"""

import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from multigpu_master.core.model import Outcome, OutcomeState, Task
from multigpu_master.core.spec import Spec
from multigpu_master.errors import JournalError
from multigpu_master.journal import request_filter as known_requests
from multigpu_master.journal.protocol import Entry
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.write_buffer import WriteBuffer

SPEC = Spec(kind="k")


def check(seed: int) -> None:
    """AssertionError: a settled request is taken for new, by the master that settled it or by the next one."""
    with tempfile.TemporaryDirectory() as place, patch.object(known_requests, "CAPACITY_MIN", 8):
        asyncio.run(_check(random.Random(seed), Path(place)))


async def _check(rng: random.Random, place: Path) -> None:
    settled: list[str] = []
    loop = asyncio.get_running_loop()
    for _ in range(2):  # two masters, one after the other
        journal = SqliteJournal(place / "data", size_max_bytes=1 << 30)
        fatal: list[str] = []
        write_buffer = WriteBuffer(journal, lambda _event: None, lambda: None, fatal.append)

        def on_commit(
            entries: Sequence[Entry], first: int, error: JournalError | None, to: WriteBuffer = write_buffer
        ) -> None:
            loop.call_soon_threadsafe(to.handle_commit, entries, first, error)

        journal.open(on_commit)
        try:
            for _ in range(rng.randrange(2, 8)):
                assert write_buffer.perhaps_known(settled) == settled, "a settled request is taken for new"
                event = rng.randrange(3)
                if event == 0 and (write_buffer._filter_load is None or write_buffer._filter_load.done()):
                    write_buffer.load_request_filter()
                elif event < 2:
                    await write_buffer.flush_and_wait()
                else:
                    new = [f"r{len(settled) + i}" for i in range(rng.choice((1, 5)))]
                    ended = [(_ended(len(settled) + i + 1, name), b"body") for i, name in enumerate(new)]
                    write_buffer.append_settles(ended, 1.0)
                    settled += new
            if write_buffer._filter_load is not None:
                await write_buffer._filter_load
            assert write_buffer.perhaps_known(settled) == settled, "a settled request is taken for new"
            await write_buffer.flush_and_wait()
            assert not fatal, fatal
        finally:
            await asyncio.to_thread(journal.close, 20.0)


def _ended(task_id: int, request_id: str) -> Task:
    task = Task(SPEC, request_id, b"payload", task_id=task_id, submit_s=1.0)
    task.outcome = Outcome(OutcomeState.SUCCEEDED, 2.0)
    return task
