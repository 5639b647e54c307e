"""Why a task fails, in terms that the engines of all model kinds share."""

from dataclasses import dataclass

from multigpu_worker.engines.base import Item, Reporter
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.repository.folders import ModelFolderError, UnknownModelError


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


# What choosing and loading a back end may raise.
LOADING_ERRORS = (ValueError, UnknownModelError, ModelFolderError, MemoryError, RuntimeError, ImportError)


def bad_input(error: Exception) -> Failure:
    return Failure(error_type="BadInput", message=str(error), retryable=False)


def of_loading(error: Exception) -> Failure:
    """The failure for one of LOADING_ERRORS."""
    match error:
        case PrecisionError():  # another worker's device may support it
            return Failure(error_type="NoSuchPrecision", message=str(error), retryable=True)
        case UnknownModelError():
            return Failure(error_type="UnknownModel", message=str(error), retryable=False)
        case ModelFolderError():
            return Failure(error_type="ModelLoadError", message=str(error), retryable=error.retryable)
        case ValueError():
            return bad_input(error)
        case ImportError():
            message = f"{error}: install what the engine needs where this worker runs (docs/dependencies.md)"
            return Failure(error_type="ModelLoadError", message=message, retryable=True)
        case _:  # another worker may have more memory
            return Failure(error_type="ModelLoadError", message=str(error), retryable=True)
