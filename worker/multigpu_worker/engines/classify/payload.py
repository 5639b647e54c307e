"""Payloads and results of tasks of kind "classify", for this engine and for users' own.

Nothing here imports torch. The size of a picture is checked before it is decoded, so that a small file cannot fill the
memory.
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
from multigpu_worker.engines.common.payloads import JSON, check_content_type, not_a_message

if TYPE_CHECKING:
    from PIL.Image import Image

TOP_K = 5
# 240 MB when decoded. Pillow warns about larger ones.
PIXELS_MAX = 80_000_000


def parse(payload: bytes, content_type: str) -> classify_pb2.ClassifyPayload:
    """Parse a payload with a picture or a text, and set its top_k. Raises BadInputError.

    As JSON it is a text, or an object with `text` or `image` (in base64) and perhaps `top_k`.
    """
    check_content_type(content_type)
    try:
        if content_type == JSON:
            parsed = _from_json(json.loads(payload))
        else:
            parsed = classify_pb2.ClassifyPayload.FromString(payload)
    except BadInputError:
        raise
    except (DecodeError, RecursionError, TypeError, ValueError) as error:
        raise not_a_message(classify_pb2.ClassifyPayload, error) from error
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
    """Decode the picture of a payload: RGB, rotated as its EXIF data says. Raises BadInputError."""
    from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415  (only pictures need Pillow)

    if payload.WhichOneof("input") != "image":
        raise BadInputError("this model classifies pictures, and the payload has a text: send the bytes of a picture")
    try:
        with Image.open(io.BytesIO(payload.image)) as found:
            if found.width * found.height > PIXELS_MAX:
                raise BadInputError(  # noqa: TRY301  only an open picture has a size
                    f"the picture has {found.width} x {found.height} pixels: send at most {PIXELS_MAX:,}"
                )
            return ImageOps.exif_transpose(found).convert("RGB")
    except UnidentifiedImageError as error:
        raise BadInputError("the payload is no picture that Pillow can read: send PNG or JPEG, say") from error
    except (BadInputError, MemoryError):
        raise
    except Exception as error:  # Pillow's formats raise errors of many classes for damaged files
        raise BadInputError(f"the picture can't be read ({error}): it is cut off or damaged") from error


def text(payload: classify_pb2.ClassifyPayload) -> str:
    """The text of a payload. Raises BadInputError."""
    if payload.WhichOneof("input") != "text":
        raise BadInputError("this model classifies texts, and the payload has a picture: send a text")
    return payload.text


def result(probabilities: npt.NDArray[np.float32], names: Sequence[str], top_k: int, content_type: str) -> bytes:
    """Write a task's result: the `top_k` likeliest classes of `probabilities`, one per class."""
    likeliest = np.argsort(-probabilities, kind="stable")[:top_k].tolist()
    classes = [
        classify_pb2.ClassScore(index=i, label=names[i] if i < len(names) else "", score=float(probabilities[i]))
        for i in likeliest
    ]
    if content_type == JSON:
        objects = [{"index": found.index, "label": found.label, "score": found.score} for found in classes]
        return json.dumps(objects, ensure_ascii=False).encode()
    return classify_pb2.ClassifyResult(classes=classes).SerializeToString()
