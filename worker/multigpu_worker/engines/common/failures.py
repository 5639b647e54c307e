"""Why a task fails, in words that the engines of models share."""

from dataclasses import dataclass

from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.models.folders import ModelFolderError, UnknownModelError


class BadInputError(ValueError):
    """The task can't be run as it is, here or anywhere. The message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an item fails."""

    error_type: str
    message: str
    retryable: bool


# What may come of choosing and loading a back end for a task.
LOADING_ERRORS = (ValueError, UnknownModelError, ModelFolderError, MemoryError, RuntimeError, ImportError)


def of_loading(error: Exception) -> Failure:
    """What to say of one of LOADING_ERRORS."""
    match error:
        case PrecisionError():  # another worker's device may have it
            return Failure(error_type="NoSuchPrecision", message=str(error), retryable=True)
        case UnknownModelError():
            return Failure(error_type="UnknownModel", message=str(error), retryable=False)
        case ModelFolderError():
            return Failure(error_type="ModelLoadError", message=str(error), retryable=error.retryable)
        case ValueError():
            return Failure(error_type="BadInput", message=str(error), retryable=False)
        case ImportError():
            message = f"{error}: install what the engine needs where this worker runs (docs/dependencies.md)"
            return Failure(error_type="ModelLoadError", message=message, retryable=True)
        case _:  # another worker may have more memory
            return Failure(error_type="ModelLoadError", message=str(error), retryable=True)
