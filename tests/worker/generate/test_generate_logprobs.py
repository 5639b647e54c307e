"""Log probabilities of generated tokens, and prompts of token ids: both equal plain transformers."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("transformers", reason="the extra `worker` is not installed")

import torch
from multigpu.v1 import generate_pb2 as pb
from multigpu_worker.engines.base import Batch, Item
from multigpu_worker.engines.generate.engine import GenerateEngine
from multigpu_worker.engines.generate.token_bytes import TokenBytes
from tokenizers import Tokenizer, decoders, models

from tests.worker.generate.generating import Ask, Plain, Recorder, ask, run_all
from tests.worker.generate.test_generate import PROMPTS, check, engine, folder, loaded, plain

__all__ = ["engine", "folder", "loaded", "plain"]

SCHEMA = '{"type": "string", "maxLength": 12}'


def check_logprobs(recorder: Recorder, plain: Plain, prompt: str, count: int) -> None:
    """The log probabilities are those of plain transformers for the tokens of the answer."""
    result = recorder.result
    tokens = list(result.token_ids)
    assert [each.token_id for each in result.logprobs] == tokens
    assert [each for chunk in recorder.parsed_chunks() for each in chunk.logprobs] == list(result.logprobs)
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in recorder.parsed_chunks())
    ids = [*plain.tokenizer(prompt)["input_ids"], *tokens]
    with torch.inference_mode():
        logits = plain.model(input_ids=torch.tensor([ids])).logits[0].float()
    expected = logits.log_softmax(-1)[len(ids) - len(tokens) - 1 : -1]
    for each, token, row in zip(result.logprobs, tokens, expected, strict=True):
        assert each.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert len(each.top) == count
        likeliest = row.sort(descending=True).values[:count].tolist()
        assert [top.logprob for top in each.top] == pytest.approx(likeliest, abs=1e-4)
        assert [float(row[top.token_id]) for top in each.top] == pytest.approx(likeliest, abs=1e-4)
        assert not any(top.top for top in each.top)


def test_logprobs_equal_transformers_in_any_company_and_whatever_the_settings(
    engine: GenerateEngine, plain: Plain
) -> None:
    settings: list[tuple[int, dict[str, Any]]] = [
        (0, {}),
        (3, {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "seed": 4}),
        (20, {"repetition_penalty": 1.6}),
        (5, {"json_schema": SCHEMA, "temperature": 0.7, "seed": 3}),
    ]

    def asks() -> list[Ask]:
        return [
            ask(prompt, max_tokens=30, logprobs=count, **fields)
            for prompt, (count, fields) in zip(PROMPTS, settings, strict=True)
        ]

    alone = [run_all(engine, [each])[0] for each in asks()]
    without = [ask("Hello", max_tokens=50), ask("xyz", max_tokens=50, temperature=1.0, seed=1)]
    together = run_all(engine, [without[0], *asks(), without[1]])
    for each in (together[0], together[-1]):
        assert not each.result.logprobs and not any(chunk.logprobs for chunk in each.parsed_chunks())
    check(together[0], plain, plain.greedy("Hello", 50))
    for recorders in (alone, together[1:-1]):
        for recorder, prompt, (count, _) in zip(recorders, PROMPTS, settings, strict=True):
            check_logprobs(recorder, plain, prompt, count)
    for first, second in zip(alone, together[1:-1], strict=True):
        assert list(first.result.token_ids) == list(second.result.token_ids)


def test_bytes_of_tokens_are_the_text(engine: GenerateEngine, plain: Plain) -> None:
    (recorder,) = run_all(engine, [ask("Schöne", max_tokens=80, temperature=1.2, seed=2, logprobs=2)])
    data = b"".join(each.token for each in recorder.result.logprobs)
    assert data.decode("utf-8", "replace").replace("\ufffd", "") == recorder.result.text.replace("\ufffd", "")
    of = TokenBytes(plain.tokenizer)
    assert [of(token) for token in plain.tokenizer("é!")["input_ids"]] == [b"\xc3", b"\xa9", b"!"]
    # Special tokens and ids without a token add no text.
    assert of(plain.tokenizer.eos_token_id) == of(10_000) == b""


def test_bytes_of_tokens_of_other_tokenizers() -> None:
    import transformers

    kind: Any = transformers.PreTrainedTokenizerFast
    vocab = {"<unk>": 0, "\u2581hi": 1, "<0xC3>": 2, "<0xA9>": 3, "lo": 4}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = kind(tokenizer_object=backend, unk_token="<unk>")
    tokenizer.add_tokens(["<tool>"])
    of = TokenBytes(tokenizer)
    assert [of(token) for token in range(6)] == [b"", b" hi", b"\xc3", b"\xa9", b"lo", b"<tool>"]
    backend = Tokenizer(models.WordLevel(vocab={"<unk>": 0, "one": 1}, unk_token="<unk>"))
    assert TokenBytes(kind(tokenizer_object=backend, unk_token="<unk>"))(1) == b"one"


def test_next_attempt_takes_the_logprobs_of_the_chunks(engine: GenerateEngine) -> None:
    first = ask("Schöne", max_tokens=24, temperature=0.8, logprobs=2)
    (whole,) = run_all(engine, [first])
    marked = []
    for data in whole.chunks:
        chunk = pb.GenerateChunk.FromString(data)
        for each in chunk.logprobs:
            each.logprob = -99
        marked.append(chunk.SerializeToString())
    cuts = range(len(whole.chunks) + 1)
    assert len(cuts) > 5
    asks = [Ask(first.payload, tuple(marked[:cut]), task_id=1) for cut in cuts]
    for cut, recorder in zip(cuts, run_all(engine, asks), strict=True):
        result, expected = recorder.result, whole.result
        taken = sum(len(pb.GenerateChunk.FromString(data).token_ids) for data in marked[:cut])
        assert [each.logprob for each in result.logprobs[:taken]] == [-99] * taken
        ours, theirs = result.logprobs[taken:], expected.logprobs[taken:]
        assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-4)
        assert [each.token for each in result.logprobs] == [each.token for each in expected.logprobs]
        assert [len(each.top) for each in result.logprobs] == [2] * len(expected.token_ids)
        assert result.text == expected.text and result.token_ids == expected.token_ids
    # The chunks are lost: their log probabilities are computed again.
    item = Item(1, 1, 2, first.payload, 1, b"", 3, ())
    batch, recorder = Batch("generate", "", {}, "", [item]), Recorder()
    engine.run(batch, engine.prepare(batch), recorder)
    assert len(recorder.chunks) == len(whole.chunks) - 3
    again = [each.logprob for each in recorder.result.logprobs]
    assert again == pytest.approx([each.logprob for each in whole.result.logprobs], abs=1e-4)
    # Chunks without log probabilities cannot be of this task.
    bare = pb.GenerateChunk.FromString(whole.chunks[0])
    bare.ClearField("logprobs")
    (rejected,) = run_all(engine, [Ask(first.payload, (bare.SerializeToString(),), task_id=1)])
    assert rejected.outcome is not None and "lacks log probabilities" in rejected.outcome[1]


def test_prompt_of_token_ids_equals_the_same_text(engine: GenerateEngine, plain: Plain, folder: Path) -> None:
    ids = plain.tokenizer("Schöne Grüße")["input_ids"]
    asks = [ask("Schöne Grüße", max_tokens=30, logprobs=1), ask(prompt_ids=ids, max_tokens=30, logprobs=1)]
    text, tokens = run_all(engine, asks)
    assert tokens.result.text == text.result.text and tokens.result.token_ids == text.result.token_ids
    assert tokens.result.prompt_tokens == len(ids)
    check_logprobs(tokens, plain, "Schöne Grüße", 1)
    bad = [ask(prompt_ids=[1, 260]), ask(prompt_ids=[1] * 512), ask(prompt_ids=[1] * 500, max_tokens=13)]
    expected = ("token 260 is unknown to the model, which has 260", "context is 512 tokens", "and 13 to generate")
    for recorder, words in zip(run_all(engine, bad), expected, strict=True):
        assert recorder.outcome is not None and recorder.outcome[0] == "BadInput" and words in recorder.outcome[1]
    # A special token of the prompt stays one.
    special = [plain.tokenizer.convert_tokens_to_ids("<|user|>"), *ids]
    (recorder,) = run_all(engine, [ask(prompt_ids=special, max_tokens=5)])
    (same,) = run_all(engine, [ask("<|user|>Schöne Grüße", max_tokens=5)])
    assert recorder.result == same.result
