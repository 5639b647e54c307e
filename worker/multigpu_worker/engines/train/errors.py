"""The error of a training job."""


class ScriptError(Exception):
    """A script can't be run, or has failed. `retryable`: whether another attempt may succeed."""

    def __init__(self, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        super().__init__(message)
        self.error_type = error_type
        self.retryable = retryable
        self.traceback = traceback
