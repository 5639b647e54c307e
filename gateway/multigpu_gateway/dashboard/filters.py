"""Filters of tasks, from a page's query string or a form, and actions on all tasks that match."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from multigpu.options import TaskFilter
from multigpu.outcome import OutcomeState
from multigpu.task import TaskState

from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import BAD_REQUEST, HttpError

# The states that a person can choose, as filters for the master.
STATES: dict[str, TaskFilter] = {
    "queued": {"states": [TaskState.QUEUED]},
    "retrying": {"retrying": True},
    "leased": {"states": [TaskState.LEASED]},
    "succeeded": {"outcomes": [OutcomeState.SUCCEEDED]},
    "unsuccessful": {"outcomes": [OutcomeState.FAILED, OutcomeState.DEAD_LETTERED, OutcomeState.EXPIRED]},
    "failed": {"outcomes": [OutcomeState.FAILED]},
    "dead-lettered": {"outcomes": [OutcomeState.DEAD_LETTERED]},
    "expired": {"outcomes": [OutcomeState.EXPIRED]},
    "cancelled": {"outcomes": [OutcomeState.CANCELLED]},
}
PERIODS = {"1h": "the last hour", "24h": "the last day", "168h": "the last week"}
_NAMES = ("queue", "kind", "model", "worker_id")
# Tasks of one List call: the master's limit.
_BATCH = 1_000


@dataclass(frozen=True)
class Filter:
    """The fields of a filter form. `since`: a key of PERIODS; tasks submitted since then match."""

    state: str = ""
    since: str = ""
    queue: str = ""
    kind: str = ""
    model: str = ""
    worker_id: str = ""

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> "Filter":
        """Returns the filter with these fields. Raises HttpError if the state or the period is unknown."""
        found = cls(**{name: fields.get(name, "").strip() for name in cls.__dataclass_fields__})
        for name, known in (("state", STATES), ("since", PERIODS)):
            value = getattr(found, name)
            if value and value not in known:
                raise HttpError(BAD_REQUEST, f"{name} is {value!r}: there are {', '.join(known)}")
        return found

    @property
    def fields(self) -> dict[str, str]:
        """The fields that are set."""
        return {name: value for name in self.__dataclass_fields__ if (value := getattr(self, name))}

    @property
    def query(self) -> str:
        return urlencode(self.fields)

    def for_master(self) -> TaskFilter:
        found: Any = {name: value for name, value in self.fields.items() if name in _NAMES}
        if self.state:
            found |= STATES[self.state]
        if self.since:
            found["submitted_after"] = datetime.now(UTC) - timedelta(hours=int(self.since.removesuffix("h")))
        return found  # type: ignore[no-any-return]


async def each_batch(pair: ClientPair, wanted: TaskFilter, act: Callable[[list[int]], Awaitable[int]]) -> int:
    """Calls `act` with the ids of all tasks that match, in batches. Returns the sum of what `act` returned."""
    total, token = 0, ""
    while True:
        tasks, token = await pair.client.list_page(page_size=_BATCH, page_token=token, **wanted)
        if tasks:
            total += await act([task.task_id for task in tasks])
        if not token:
            return total
