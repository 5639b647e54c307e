"""TaskFailed: the class, the cause and the traceback of what was raised in a worker."""

import pickle
import traceback
import urllib.error

import multigpu
import pytest
from multigpu.v1 import task_pb2

TRACEBACK = 'Traceback (most recent call last):\n  File "my_handlers.py", line 7, in area\nValueError: two sides\n'


class ReadOnly(Exception):  # noqa: N818  a test's
    """One that refuses the attributes of a TaskFailed."""

    @property
    def outcome(self) -> str:
        return "mine"


class OwnError(Exception):
    """One whose constructor wants more than a message."""

    def __init__(self, code: int, *, colour: str) -> None:
        super().__init__(f"{code} {colour}")
        self.code = code


class Model:
    class NotReadyError(Exception):
        """One of a class."""


def error_of(type_: str, *, state: int = task_pb2.OUTCOME_STATE_FAILED, text: str = "two sides") -> multigpu.TaskError:
    failure = task_pb2.TaskError(type=type_, message=text, traceback=TRACEBACK)
    outcome = task_pb2.Outcome(task_id=7, state=state, error=failure, attempts=2)  # type: ignore[arg-type]  # an enum
    return multigpu.Outcome(outcome).to_error()


@pytest.mark.parametrize(
    ("type_", "cls"),
    [
        ("ValueError", ValueError),
        ("ConnectionResetError", OSError),
        ("KeyError", LookupError),
        (f"{__name__}.OwnError", OwnError),
        ("UnicodeDecodeError", UnicodeDecodeError),
        ("pickle.PickleError", pickle.PickleError),
        (f"{__name__}.Model.NotReadyError", Model.NotReadyError),
        ("OutOfMemory", MemoryError),
    ],
)
def test_a_failure_is_of_the_class_that_was_raised(type_: str, cls: type[Exception]) -> None:
    with pytest.raises(cls) as caught:
        raise error_of(type_)
    error = caught.value
    assert isinstance(error, multigpu.TaskFailed)
    assert "task 7 ended FAILED with" in str(error)
    assert "two sides (2 attempts)" in str(error)
    assert "two sides" in repr(error)
    assert error.attempts == 2
    assert type(error_of(type_)) is type(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


@pytest.mark.parametrize(
    "type_",
    ["BadInput", "RunTimeout", "no.such.Error", "SystemExit", "KeyboardInterrupt", "ExceptionGroup", "print", "os.sep",
     "multigpu.outcome.TaskFailed", "multigpu.errors.CallTimeoutError", f"{__name__}.ReadOnly", "Exception", "",
     "StopIteration", "StopAsyncIteration", "concurrent.futures._base.CancelledError"],
)  # fmt: skip
def test_other_names_are_plain_failures(type_: str) -> None:
    error = error_of(type_)
    assert type(error) is multigpu.TaskFailed


def test_a_class_whose_attributes_need_its_constructor_can_be_printed() -> None:
    """HTTPError has a __getattr__ that reads what its __init__ sets."""
    error = error_of("urllib.error.HTTPError")
    assert isinstance(error, urllib.error.HTTPError)
    assert "two sides" in "".join(traceback.format_exception(error))
    assert not hasattr(error, "no_such_attribute")
    error.add_note("a note")
    with pytest.raises(AttributeError, match="not its 'file'"):
        error.file  # noqa: B018


def test_a_class_that_is_not_imported_is_not_imported_for_it() -> None:
    assert type(error_of("antigravity.Error")) is multigpu.TaskFailed
    assert "antigravity" not in __import__("sys").modules


def test_the_cause_has_the_workers_traceback() -> None:
    error = error_of("ValueError")
    cause = error.__cause__
    assert isinstance(cause, multigpu.RemoteError)
    assert (cause.type, cause.message, cause.traceback) == ("ValueError", "two sides", TRACEBACK)
    printed = "".join(traceback.format_exception(error))
    assert 'File "my_handlers.py", line 7, in area' in printed
    assert printed.index("my_handlers.py") < printed.index("the direct cause of")


def test_dead_lettered_is_a_state_of_a_failure() -> None:
    error = error_of("ValueError", state=task_pb2.OUTCOME_STATE_DEAD_LETTERED)
    assert isinstance(error, multigpu.TaskFailed)
    assert isinstance(error, ValueError)
    assert error.dead_lettered
    failed = error_of("ValueError")
    assert isinstance(failed, multigpu.TaskFailed)
    assert not failed.dead_lettered
