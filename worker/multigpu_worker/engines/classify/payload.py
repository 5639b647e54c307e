"""Payloads and results of tasks of kind "classify", for the engine here and for a user's own.

Nothing here imports torch. A picture is foreign data: its size is looked at before it is unpacked, so that a small file
can't fill the memory.
"""

import base64
import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from multigpu.v1 import classify_pb2

from multigpu_worker.engines.common.failures import BadInputError

if TYPE_CHECKING:
    from PIL.Image import Image

JSON = "application/json"
TOP_K = 5
# 240 MB once unpacked; Pillow warns of more.
PIXELS_MAX = 80_000_000


def parse(payload: bytes, content_type: str) -> classify_pb2.ClassifyPayload:
    """A payload with a picture or a text in it, and with its top_k. Raises BadInputError.

    As JSON it is a text, or an object with `text` or `image` (in base64) and perhaps `top_k`.
    """
    if content_type not in {"", JSON}:
        raise BadInputError(f'content type {content_type!r} is not supported: leave it empty or use "{JSON}"')
    try:
        if content_type == JSON:
            parsed = _from_json(json.loads(payload))
        else:
            parsed = classify_pb2.ClassifyPayload.FromString(payload)
    except BadInputError:
        raise
    except (DecodeError, RecursionError, TypeError, ValueError) as error:
        raise BadInputError(
            f"the payload is no multigpu.v1.ClassifyPayload ({error}): send one, or JSON with content type {JSON}"
        ) from error
    if parsed.WhichOneof("input") is None:
        raise BadInputError("the payload has neither a picture nor a text: send one of them")
    parsed.top_k = parsed.top_k or TOP_K
    return parsed


def _from_json(value: Any) -> classify_pb2.ClassifyPayload:
    if isinstance(value, str):
        return classify_pb2.ClassifyPayload(text=value)
    if not isinstance(value, dict) or not set(value) <= {"text", "image", "top_k"} or {"text", "image"} <= set(value):
        raise BadInputError("the payload must be a JSON string, or an object with text or image, and top_k")
    if "image" in value:
        value["image"] = base64.b64decode(value["image"], validate=True)
    return classify_pb2.ClassifyPayload(**value)


def picture(payload: classify_pb2.ClassifyPayload) -> "Image":
    """The picture of a payload: RGB, the right way up. Raises BadInputError."""
    from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415  (only pictures need Pillow)

    if payload.WhichOneof("input") != "image":
        raise BadInputError("this model classifies pictures, and the payload has a text: send the bytes of a picture")
    try:
        with Image.open(io.BytesIO(payload.image)) as found:
            if found.width * found.height > PIXELS_MAX:
                raise BadInputError(
                    f"the picture has {found.width} x {found.height} pixels: send at most {PIXELS_MAX:,}"
                )
            return ImageOps.exif_transpose(found).convert("RGB")
    except UnidentifiedImageError as error:
        raise BadInputError("the payload is no picture that Pillow can read: send PNG or JPEG, say") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(f"the picture can't be read ({error}): it is cut off or damaged") from error


def text(payload: classify_pb2.ClassifyPayload) -> str:
    """The text of a payload. Raises BadInputError."""
    if payload.WhichOneof("input") != "text":
        raise BadInputError("this model classifies texts, and the payload has a picture: send a text")
    return payload.text


def result(probabilities: npt.NDArray[np.float32], names: Sequence[str], top_k: int, content_type: str) -> bytes:
    """What a task answers: the likeliest of `probabilities`, one for each class, in the form that it was asked in."""
    likeliest = np.argsort(-probabilities, kind="stable")[:top_k].tolist()
    classes = [
        classify_pb2.ClassScore(index=i, label=names[i] if i < len(names) else "", score=float(probabilities[i]))
        for i in likeliest
    ]
    if content_type == JSON:
        plain = [{"index": found.index, "label": found.label, "score": found.score} for found in classes]
        return json.dumps(plain, ensure_ascii=False).encode()
    return classify_pb2.ClassifyResult(classes=classes).SerializeToString()
