"""What the payloads of all model kinds have in common: a protobuf message or JSON, by the batch's content type."""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from multigpu_worker.engines.common.failures import BadInputError

JSON = "application/json"

M = TypeVar("M", bound=Message)


def check_content_type(content_type: str) -> None:
    """Raises BadInputError unless it is JSON or empty (protobuf)."""
    if content_type not in {"", JSON}:
        raise BadInputError(f'content type {content_type!r} is not supported: leave it empty or use "{JSON}"')


def parse_message(kind: type[M], payload: bytes) -> M:
    """Parse a protobuf payload. Raises BadInputError."""
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise not_a_message(kind, error) from error


def not_a_message(kind: type[Message], error: Exception) -> BadInputError:
    """The error for a payload that is not such a message, in either form."""
    return BadInputError(
        f"the payload is no multigpu.v1.{kind.__name__} ({error}): send one, or JSON with content type {JSON}"
    )
