"""The bodies and query strings of the REST routes. A field that is not here is rejected with an error that names it."""

import base64
import binascii
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from multigpu.options import USAGE_KEYS, TaskFilter
from multigpu.outcome import OpenEnum, OutcomeState
from multigpu.task import TaskState

from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.http import Request, validation_error

T = TypeVar("T")
TASKS_MAX = 10_000
WAIT_MAX_S = 60.0
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
Instant = Annotated[datetime, Meta(tz=True)]
# Options of a task, with the names that they have in multigpu.options.
_OPTIONS = (
    "model", "queue", "priority", "parameters", "labels", "deadline", "queue_timeout_s", "run_timeout_s",
    "result_ttl_s", "attempts_max", "ephemeral", "wait_for_worker", "world_size", "world_size_min",
    "spread_ranks",
)  # fmt: skip


class _WithInstants(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Raises HttpError if an instant is outside the years 1 to 9999 in UTC."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            instant = getattr(self, name)
            try:
                if isinstance(instant, datetime):
                    instant.astimezone(UTC)
            except OverflowError:
                raise wrong(name, "it is outside the years 1 to 9999 in UTC") from None


class TaskRequest(_WithInstants):
    """A task to submit. UNSET: the master's default."""

    kind: Annotated[str, Meta(min_length=1)]
    payload: Any = UNSET
    payload_base64: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    queue: str | UnsetType = UNSET
    priority: Annotated[int, Meta(ge=1, le=5)] | UnsetType = UNSET
    parameters: dict[str, str] | UnsetType = UNSET
    labels: dict[str, str] | UnsetType = UNSET
    deadline: Instant | UnsetType = UNSET
    queue_timeout_s: Seconds | UnsetType = UNSET
    run_timeout_s: Seconds | UnsetType = UNSET
    result_ttl_s: Seconds | UnsetType = UNSET
    attempts_max: Annotated[int, Meta(ge=1, le=100)] | UnsetType = UNSET
    world_size: Annotated[int, Meta(ge=1, le=1024)] | UnsetType = UNSET
    world_size_min: Annotated[int, Meta(ge=1, le=1024)] | UnsetType = UNSET
    spread_ranks: bool | UnsetType = UNSET
    ephemeral: bool | UnsetType = UNSET
    wait_for_worker: bool | UnsetType = UNSET
    request_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    partition_key: str = ""
    units: Annotated[int, Meta(ge=1, le=(1 << 32) - 1)] = 1

    @property
    def options(self) -> dict[str, Any]:
        """The options (of SpecOptions) that the request sets."""
        given = {name: getattr(self, name) for name in _OPTIONS}
        return {name: value for name, value in given.items() if value is not UNSET}

    def payload_value(self) -> Any:
        """Returns the payload. Raises HttpError if there is none, if there are two, or for invalid base64."""
        if (self.payload is UNSET) == (self.payload_base64 is UNSET):
            raise wrong("payload", "give payload (a JSON value) or payload_base64 (bytes)")
        if self.payload_base64 is UNSET:
            return self.payload
        try:
            return base64.b64decode(self.payload_base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise wrong("payload_base64", f"it is no base64: {error}") from None


class SubmitRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Many tasks. Each is checked separately: an invalid one does not reject the others."""

    tasks: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=TASKS_MAX)]


class GetQuery(msgspec.Struct, forbid_unknown_fields=True):
    wait: Annotated[float, Meta(ge=0, le=WAIT_MAX_S)] = 0.0


class CancelQuery(msgspec.Struct, forbid_unknown_fields=True):
    reason: Annotated[str, Meta(max_length=1024)] = ""


class NoQuery(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters."""


class OutcomesQuery(msgspec.Struct, forbid_unknown_fields=True):
    cursor: str = ""
    from_now: bool = False
    queue: str = ""
    kind: str = ""


class UsageQuery(_WithInstants):
    """`by`: comma-separated names."""

    by: str = "queue"
    begin: Instant | None = None
    end: Instant | None = None

    def keys(self) -> list[str]:
        """Returns the names in `by`. Raises HttpError if usage can't be summed by one of them."""
        names = [name.strip() for name in self.by.split(",") if name.strip()]
        for name in names:
            if name not in USAGE_KEYS:
                raise wrong("by", f"there is no {name!r}; there are {', '.join(USAGE_KEYS)}")
        return names


class ListQuery(_WithInstants):
    """`state`, `outcome`: comma-separated names."""

    state: str = ""
    outcome: str = ""
    queue: str = ""
    kind: str = ""
    model: str = ""
    worker_id: str = ""
    submitted_after: Instant | None = None
    submitted_before: Instant | None = None
    retrying: bool = False
    oldest_first: bool = False
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    page_token: str = ""

    def filters(self) -> TaskFilter:
        """Returns the filters that are set. Raises HttpError if a state or an outcome is unknown."""
        found: dict[str, Any] = {name: getattr(self, name) for name in ("queue", "kind", "model", "worker_id")}
        found |= {"states": _members("state", self.state, TaskState)}
        found |= {"outcomes": _members("outcome", self.outcome, OutcomeState)}
        found |= {name: getattr(self, name) for name in ("submitted_after", "submitted_before", "retrying")}
        filters: TaskFilter = {name: value for name, value in found.items() if value}  # type: ignore[assignment]
        return filters


def query_of(request: Request, kind: type[T]) -> T:
    """Returns the query string as a Struct. Raises HttpError if a parameter is unknown or invalid."""
    try:
        return msgspec.convert(request.query, kind, strict=False)
    except msgspec.ValidationError as error:
        raise validation_error(error) from None


def wrong(field: str, message: str) -> HttpError:
    return HttpError(BAD_REQUEST, f"{field}: {message}", param=field)


def _members(field: str, names: str, enum: type[OpenEnum]) -> list[OpenEnum]:
    known = {each.name: each for each in enum if each}
    given = [name.strip().upper() for name in names.split(",")] if names else []
    for name in given:
        if name not in known:
            raise wrong(field, f"there is no {name!r}; there are {', '.join(known)}")
    return [known[name] for name in given]
