"""The classify engine: the classes that plain transformers finds, whatever the neighbours in the batch are."""

import base64
import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("PIL", reason="the extra `vision` is not installed")

import torch
from multigpu.v1 import classify_pb2
from multigpu_worker.engines.base import Batch, EngineSettings, Item
from multigpu_worker.engines.classify.engine import ClassifyEngine
from multigpu_worker.engines.classify.payload import PIXELS_MAX, parse, picture
from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.common.limits import Limit
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec
from PIL import Image, ImageOps

from tests.worker.embed.test_embed import Recorder, run

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "the", "was", "very"]
TEXTS = ["the film was good", "bad", "the film was very very very very very very bad " * 3, "", "unknown words here"]
SMALL: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with three classes, as transformers saves one."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    folder = tmp_path_factory.mktemp("text")
    torch.manual_seed(3)
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=24, id2label=labels, **SMALL)
    BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    assert tokenizer("good film")["input_ids"] == [2, 4, 6, 3]
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ViT with four classes."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

    folder = tmp_path_factory.mktemp("image")
    torch.manual_seed(4)
    config = ViTConfig(image_size=32, patch_size=8, id2label={i: f"class {i}" for i in range(4)}, **SMALL)
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def engine_of(folder: Path, **of_model: Any) -> ClassifyEngine:
    """A loaded engine."""
    spec = ModelSpec(name="m", folder=folder, kind="classify", source="huggingface", **of_model)
    engine = ClassifyEngine(EngineSettings(device="cpu", slots=1, threads=1, models={"m": spec}))
    engine.load()
    return engine


def batch_of(payloads: list[bytes], content_type: str = "", **parameters: str) -> Batch:
    items = [Item(i, i, 1, payload, 1, b"", 0) for i, payload in enumerate(payloads)]
    return Batch(kind="classify", model="m", parameters=parameters, content_type=content_type, items=items)


def classes(recorder: Recorder, lease_id: int) -> list[tuple[int, str, float]]:
    kind, result, _ = recorder.outcomes[lease_id]
    assert kind == "ok", (kind, result)
    return [(c.index, c.label, c.score) for c in classify_pb2.ClassifyResult.FromString(result).classes]


def text(words: str, top_k: int = 0) -> bytes:
    return classify_pb2.ClassifyPayload(text=words, top_k=top_k).SerializeToString()


def image(size: tuple[int, int], seed: int, form: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form)
    return out.getvalue()


def picture_payload(data: bytes, top_k: int = 0) -> bytes:
    return classify_pb2.ClassifyPayload(image=data, top_k=top_k).SerializeToString()


def expected_texts(folder: Path) -> list[Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        return [
            model(**tokenizer(t, truncation=True, max_length=24, return_tensors="pt")).logits.softmax(-1)[0]
            for t in TEXTS
        ]


def test_texts_get_the_classes_of_transformers(text_folder: Path) -> None:
    engine = engine_of(text_folder)
    assert engine.load() == {"engine": "torch", "precision": "fp32", "classes": "3"}
    recorder = run(engine, batch_of([text(words) for words in TEXTS]))
    for i, expected in enumerate(expected_texts(text_folder)):
        found = classes(recorder, i)
        assert [label for _, label, _ in found] == [["no", "perhaps", "yes"][j] for j in expected.argsort().flip(0)]
        assert [score for _, _, score in found] == pytest.approx(sorted(expected.tolist(), reverse=True), abs=1e-5)


def test_top_k_content_type_and_cancellation_are_honoured_and_wrong_parameters_rejected(text_folder: Path) -> None:
    engine = engine_of(text_folder)
    assert len(classes(run(engine, batch_of([text("good", 2)])), 0)) == 2
    asked = [b'"good"', b'{"text": "good", "top_k": 1}']
    recorder = run(engine, batch_of(asked, "application/json"))
    whole, one = (json.loads(recorder.outcomes[i][1]) for i in range(2))
    assert (len(whole), one) == (3, whole[:1])
    assert recorder.outcomes[0][2] == "application/json"
    recorder = run(engine, batch_of([text("good"), text("bad")]), Recorder(cancelled_ids={0}))
    assert list(recorder.outcomes) == [1]
    message = "classify has no task parameter 'engine': name the engine in the model's model.toml"
    assert run(engine, batch_of([text("good")], engine="torch")).outcomes == {0: ("BadInput", message, False)}
    with pytest.raises(PrecisionError, match="int8"):
        engine_of(text_folder, precision="int8")
    with pytest.raises(ModelFolderError, match='classify runs on engine torch only, not on onnx: set engine = "torch"'):
        engine_of(text_folder, engine="onnx")


def test_pictures_get_the_classes_of_transformers_and_a_bad_one_fails_alone(image_folder: Path) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    sizes = [(40, 60), (32, 32), (100, 7)]
    pictures = [image(size, i, "JPEG" if i else "PNG") for i, size in enumerate(sizes)]
    bad = [b"no picture", pictures[1][:200], b""]
    payloads = [picture_payload(data) for data in [*pictures, *bad[:2]]] + [text("words"), picture_payload(b"")]
    engine = engine_of(image_folder)
    recorder = run(engine, batch_of(payloads))
    model = AutoModelForImageClassification.from_pretrained(image_folder)
    processor: Any = AutoImageProcessor.from_pretrained(image_folder)  # type: ignore[no-untyped-call]
    for i, data in enumerate(pictures):
        with torch.inference_mode():
            inputs = processor(Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="pt")
            expected = model(**inputs).logits.softmax(-1)[0]
        found = {index: score for index, _, score in classes(recorder, i)}
        assert [found[j] for j in range(4)] == pytest.approx(expected.tolist(), abs=1e-5)
    for i, words in ((3, "no picture that"), (4, "cut off or damaged"), (5, "has a text"), (6, "no picture that")):
        kind, message, retryable = recorder.outcomes[i]
        assert (kind, retryable) == ("BadInput", False)
        assert words in message
    encoded = json.dumps({"image": base64.b64encode(pictures[0]).decode()}).encode()
    as_json = json.loads(run(engine, batch_of([encoded], "application/json")).outcomes[0][1])
    assert as_json[0]["index"] == classes(recorder, 0)[0][0]


def test_out_of_memory_halves_the_limit(text_folder: Path) -> None:
    engine = engine_of(text_folder)
    model = engine._model
    whole: Callable[..., Any] = model.probabilities
    sizes = []

    class Short:
        front, names, budget, limit = model.front, model.names, 10_000, Limit()

        def probabilities(self, features: list[Any]) -> Any:
            sizes.append(len(features))
            if len(features) > 2:
                raise MemoryError("too many")
            return whole(features)

    short: Any = Short()
    engine._model = short
    recorder = run(engine, batch_of([text("the film")] * 9))
    assert all(kind == "ok" for kind, _, _ in recorder.outcomes.values())
    assert sizes[:3] == [9, 4, 2]
    assert max(sizes[2:]) == 2
    sizes.clear()
    run(engine, batch_of([text("the film")] * 9))
    assert max(sizes) == 2
    short.probabilities = lambda features: (_ for _ in ()).throw(MemoryError("none at all"))
    kind, message, retryable = run(engine, batch_of([text("good")])).outcomes[0]
    assert (kind, retryable) == ("OutOfMemory", True)
    assert "none at all" in message


def test_folder_without_a_classifier_is_rejected(text_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(ModelFolderError, match=r"BertModel.*kind classify takes"):
        engine_of(tmp_path)
    for path in text_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["classifier.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"classifier\.weight"):
        engine_of(tmp_path)


@pytest.mark.parametrize("error", [RuntimeError, struct.error, NotImplementedError])
def test_a_picture_whose_format_raises_any_error_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Damaged AVIF, EXIF and DDS data do. Other errors would fail the pictures of a whole batch."""
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "PNG")

    def damaged(_: Any) -> Any:
        raise error("damaged")

    monkeypatch.setattr(ImageOps, "exif_transpose", damaged)
    with pytest.raises(BadInputError, match=r"can't be read \(damaged\)"):
        picture(parse(picture_payload(out.getvalue()), ""))


def test_huge_picture_in_a_small_file_is_not_decoded() -> None:
    out = io.BytesIO()
    side = int(PIXELS_MAX**0.5) + 1
    Image.new("1", (side, side)).save(out, "PNG")
    with pytest.raises(BadInputError, match="pixels"):
        picture(parse(picture_payload(out.getvalue()), ""))


@pytest.mark.parametrize(
    ("payload", "content_type", "words"),
    [
        (b"\xff\xff", "", "no multigpu.v1.ClassifyPayload"),
        (b"", "", "neither a picture nor a text"),
        (b"{", "application/json", "no multigpu"),
        (b"[1]", "application/json", "JSON string"),
        (b'{"text": "a", "image": ""}', "application/json", "JSON string"),
        (b'{"text": 3}', "application/json", "no multigpu"),
        (b'{"image": "?"}', "application/json", "no multigpu"),
        (b"x", "text/plain", "not supported"),
    ],
)
def test_unreadable_payloads_are_rejected(payload: bytes, content_type: str, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        parse(payload, content_type)
