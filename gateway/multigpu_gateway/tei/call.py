"""One request to a model, and its tasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from multigpu import errors
from multigpu.fleet import Model

from multigpu_gateway import tasks
from multigpu_gateway.clients import Connected
from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.tei.errors import backend_error, empty

# Inputs of one request (TEI's max_client_batch_size), and of one of its tasks: a long list is spread over the workers.
INPUTS_MAX, TASK_INPUTS = 10_000, 32


class Truncated(msgspec.Struct, kw_only=True):
    """What all requests have. None: not given."""

    truncate: bool | None = None
    truncation_direction: str | None = None

    def check(self) -> None:
        """HttpError: a field asks for what the engines can't do."""
        if self.truncate is False:
            message = "truncate is false, and longer texts are always cut at the model's limit: leave truncate out"
            raise HttpError(BAD_REQUEST, message, param="truncate")
        if self.truncation_direction not in (None, "right", "Right"):
            message = f"truncation_direction is {self.truncation_direction!r}: only Right is served"
            raise HttpError(BAD_REQUEST, message, param="truncation_direction")


@dataclass(frozen=True, slots=True)
class Answer:
    """A JSON value. `characters`, `tokens`: of all inputs; None: unknown, and no header says them."""

    value: Any
    characters: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A request of HTTP or of gRPC. `model`: as its tasks have it; empty: the workers' default."""

    request: tasks.Call
    connected: Connected
    model: str

    async def run(self, kind: str, payloads: Sequence[tuple[bytes, int]]) -> list[bytes]:
        """The results of tasks, each with its payload and its number of inputs, which run together."""
        options = tasks.TaskSettings(self.request, self.model).each()
        run = self.connected.client.run
        each = zip(payloads, options, strict=False)
        try:
            return await tasks.all_of(run(kind, payload, units=units, **own) for (payload, units), own in each)
        except errors.UnplaceableError as error:
            if (found := await self.find_model()) is not None and found.kind != kind:
                raise backend_error(f"model {self.model!r} serves {found.kind}, not {kind}") from error
            raise

    async def find_model(self) -> Model | None:
        """The model of that name in the fleet, if any worker can serve it."""
        name, _, version = self.model.partition(":")
        models = [entry.model for entry in await self.connected.admin.list_models(name)]
        served = (each for each in models if not each.error)
        return next((each for each in served if each.version == version or (each.current and not version)), None)


def check_count(count: int, param: str) -> None:
    """HttpError: there are no inputs, or too many."""
    if not count:
        raise empty(param)
    if count > INPUTS_MAX:
        message = f"batch size {count} > maximum allowed batch size {INPUTS_MAX}"
        raise HttpError(BAD_REQUEST, message, param=param)
