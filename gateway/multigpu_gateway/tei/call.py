"""A request to a model, and its tasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from multigpu import errors
from multigpu.fleet import Model

from multigpu_gateway import tasks
from multigpu_gateway.clients import ClientPair
from multigpu_gateway.errors import BAD_REQUEST, HttpError
from multigpu_gateway.tei.errors import backend_error, empty

# Limits of inputs: of a request (TEI's max_client_batch_size), and of each of its tasks, so that workers share a list.
INPUTS_MAX, TASK_INPUTS = 10_000, 32


class Truncated(msgspec.Struct, kw_only=True):
    """The fields that most requests share. None: not given."""

    truncate: bool | None = None
    truncation_direction: str | None = None

    def check(self) -> None:
        """Raises HttpError if a field asks for something that the engines can't do."""
        if self.truncate is False:
            message = "truncate is false, and longer texts are always cut at the model's limit: leave truncate out"
            raise HttpError(BAD_REQUEST, message, param="truncate")
        if self.truncation_direction not in (None, "right", "Right"):
            message = f"truncation_direction is {self.truncation_direction!r}: only Right is served"
            raise HttpError(BAD_REQUEST, message, param="truncation_direction")


@dataclass(frozen=True, slots=True)
class Answer:
    """The value of a response. `characters`, `tokens`: numbers in all inputs, for headers; None: unknown, no header."""

    value: Any
    characters: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A request over HTTP or gRPC. `model`: the option of its tasks; "": the workers' default model."""

    request: tasks.Call
    pair: ClientPair
    model: str

    async def run(self, kind: str, payloads: Sequence[tuple[bytes, int]]) -> list[bytes]:
        """Runs a task for each (payload, number of inputs) concurrently. Returns their results."""
        options = tasks.TaskSettings(self.request, self.model).options_of_tasks()
        run = self.pair.client.run
        each = zip(payloads, options, strict=False)
        try:
            return await tasks.gather_or_cancel(
                run(kind, payload, units=units, **own) for (payload, units), own in each
            )
        except errors.UnplaceableError as error:
            if (found := await self.find_model()) is not None and found.kind != kind:
                raise backend_error(f"model {self.model!r} serves {found.kind}, not {kind}") from error
            raise

    async def find_model(self) -> Model | None:
        """Returns the model that `model` names. None if no worker offers it without an error."""
        name, _, version = self.model.partition(":")
        models = [entry.model for entry in await self.pair.admin.list_models(name)]
        served = (each for each in models if not each.error)
        return next((each for each in served if each.version == version or (each.current and not version)), None)


def check_count(count: int, param: str) -> None:
    """Raises HttpError if there are no inputs, or too many."""
    if not count:
        raise empty(param)
    if count > INPUTS_MAX:
        message = f"batch size {count} > maximum allowed batch size {INPUTS_MAX}"
        raise HttpError(BAD_REQUEST, message, param=param)
