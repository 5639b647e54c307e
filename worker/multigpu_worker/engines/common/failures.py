"""Why a task fails, in terms that the engines of all model kinds share."""

from collections.abc import Collection
from dataclasses import dataclass

from multigpu._ranks import WORLD_SIZE

from multigpu_worker.engines.base import Batch, Item, Reporter


class BadInputError(ValueError):
    """The task cannot run on any worker. The message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an item fails."""

    error_type: str
    message: str
    retryable: bool

    def report(self, item: Item, reporter: Reporter) -> None:
        reporter.fail(item, self.error_type, self.message, retryable=self.retryable)


def bad_input(error: Exception) -> Failure:
    return Failure(error_type="BadInput", message=str(error), retryable=False)


def check_parameters(batch: Batch, known: Collection[str] = ()) -> None:
    """Raises BadInputError if tasks have parameters that their engine does not know."""
    if WORLD_SIZE in batch.parameters:
        raise BadInputError(f"{batch.kind} does not run on several workers: leave world_size out")
    for name in batch.parameters:
        if name in known:
            continue
        remedy = f"name the {name} in the model's model.toml" if name in {"engine", "precision"} else "leave it out"
        raise BadInputError(f"{batch.kind} has no task parameter {name!r}: {remedy}")
