"""Damaged and hostile payloads: engines read them, or fail with BadInput."""

import io
import json
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from multigpu._kinds.inference import input_of
from multigpu.v1 import classify_pb2, embed_pb2, generate_pb2
from multigpu_worker.engines.classify import payload as classify_input
from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.common.tensors import TensorSpec
from multigpu_worker.engines.embed import payload as embed_payload
from multigpu_worker.engines.generate import payload as generate_task
from multigpu_worker.engines.infer import payload as infer_input

from tests.hostile.targets.inputs import Maker

Image = pytest.importorskip("PIL.Image")

JSON = "application/json"
TRIES = 300
MODEL: Any = SimpleNamespace(
    inputs=[
        TensorSpec(name="x", dtype="float32", shape=(None, 4)),
        TensorSpec(name="y", dtype="int64", shape=(None, None)),
    ],
    outputs=[TensorSpec(name="z", dtype="float32")],
)


class Tokenizer:
    chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, 2, 3]}


def read_classify(payload: bytes, content_type: str) -> object:
    asked = classify_input.parse(payload, content_type)
    return classify_input.picture(asked) if asked.image else classify_input.text(asked)


def read_generate(payload: bytes, content_type: str) -> object:
    return generate_task.read_request(payload, content_type, Tokenizer(), 100, 7)


def read_infer(payload: bytes, content_type: str) -> object:
    return infer_input.parse(payload, content_type, MODEL)


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    return file.getvalue()


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


TENSORS: Any = {"x": np.ones((2, 4), np.float32), "y": np.ones((2, 3), np.int64)}
GENERATE = generate_pb2.GeneratePayload(prompt="hi", max_tokens=5, temperature=0.5, stop=["x"], seed=4)
Case = tuple[Callable[[bytes, str], object], bytes, str]
CASES: dict[str, Case] = {
    "infer": (read_infer, input_of(TENSORS, ["z"])[0], ""),
    "infer, JSON": (read_infer, as_json({"inputs": {"x": [[1, 2, 3, 4]], "y": [[1, 2]]}, "outputs": ["z"]}), JSON),
    "classify": (read_classify, classify_pb2.ClassifyPayload(image=picture(), top_k=3).SerializeToString(), ""),
    "classify, JSON": (read_classify, as_json({"text": "a", "top_k": 3}), JSON),
    "generate": (read_generate, GENERATE.SerializeToString(), ""),
    "generate, JSON": (read_generate, as_json({"prompt": "hi", "max_tokens": 5}), JSON),
    "embed": (embed_payload.parse_texts, embed_pb2.EmbedPayload(texts=["a", "b"]).SerializeToString(), ""),
    "embed, JSON": (embed_payload.parse_texts, as_json(["a", "b"]), JSON),
}


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_payload_is_read_or_rejected(name: str) -> None:
    read, payload, content_type = CASES[name]
    maker = Maker(Random(1))
    assert read(payload, content_type)
    fine = bad = 0
    for _ in range(TRIES):
        try:
            read(maker.damaged(payload), content_type)
            fine += 1
        except BadInputError as error:
            assert str(error)
            bad += 1
    assert fine
    assert bad
