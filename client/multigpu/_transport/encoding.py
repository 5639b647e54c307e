"""Payloads and results as Python values: bytes travel as they are, everything else as JSON.

The master reads neither; a content type beside the bytes says which it is, empty for raw bytes.
"""

import json
from typing import Any

RAW = ""
JSON = "application/json"

# One encoder for all calls: json.dumps builds a new one whenever an option differs from its defaults.
_encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def encode(value: Any) -> tuple[bytes, str]:
    """The payload and content type of a value. ValueError: neither bytes nor JSON."""
    if isinstance(value, bytes):
        return value, RAW
    if isinstance(value, bytearray | memoryview):
        return bytes(value), RAW
    try:
        return _encode_json(value).encode(), JSON
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"a payload must be bytes or a JSON value, and this {type(value).__name__} is neither: {error}"
        ) from error


def decode(data: bytes, content_type: str) -> Any:
    """The value of a result: JSON is parsed, every other content type stays bytes. ValueError: it is not JSON."""
    return json.loads(data) if content_type == JSON else data
