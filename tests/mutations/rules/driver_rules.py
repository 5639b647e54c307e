"""The driver's rules as a checker, with the fixtures of tests/master/test_driver.py."""

import asyncio
import tempfile
from pathlib import Path

from multigpu_master.core import events as ev
from multigpu_master.driver import BrokenError

from tests.master.test_driver import Stage, leases_of


def check(_seed: int) -> None:
    """AssertionError: a rule is broken."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_failed_event(Path(folder)))


async def _failed_event(folder: Path) -> None:
    """An outcome that cannot be delivered is journaled, and the driver handles no further event."""
    stage = Stage(folder)
    try:
        tasks = stage.submit("one", "two")
        await stage.durable()
        stage.outbox.room_for = _fail  # type: ignore[method-assign,assignment]
        for _ in range(2):
            try:
                stage.driver.handle(ev.Reports(1, [x.lease_id for x in leases_of(tasks)], [b"1", b"2"]))
            except BrokenError:
                continue
            raise AssertionError("the driver continues after a failed event")
        assert len(stage.fatal) == 1, "the fatal callback was not called exactly once"
        assert stage.driver.core.counters.stale_reports == 0, "an event was handled after one that failed"
        await stage.durable()
        assert set(stage.journal.find_requests(["one", "two"])) == {"one", "two"}, "outcomes are not journaled"
    finally:
        stage.journal.close(20)


def _fail(*_: object) -> None:
    raise OSError("injected fault")
