"""The generate engine on a tiny model: answers equal those of plain transformers, alone or with other tasks."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("transformers", reason="the extra `worker` is not installed")

import torch
from multigpu.v1 import generate_pb2 as pb
from multigpu_worker.engines.base import Batch, Item
from multigpu_worker.engines.common.payloads import JSON
from multigpu_worker.engines.generate.engine import GenerateEngine

from tests.worker.generate.generating import PATIENCE_S, Ask, Plain, Recorder, ask, run_all, settings_of
from tests.worker.generate.tiny_llama import save_tiny_llama

PROMPTS = ["Hello", "a", "one two three " * 12, "Schöne Grüße"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(path)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    return Plain.load(folder)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[GenerateEngine]:
    engine = GenerateEngine(settings_of(folder))
    facts = engine.load()
    assert facts["engine"] == "torch" and facts["precision"] == "fp32" and facts["context"] == "512 tokens"
    yield engine
    engine.close()


@pytest.fixture
def engine(loaded: GenerateEngine) -> Iterator[GenerateEngine]:
    yield loaded
    assert loaded._runner is not None
    assert loaded._runner._pool.used == 0, "blocks were lost"
    assert not loaded._runner._running and not loaded._runner._waiting


def check(recorder: Recorder, plain: Plain, tokens: list[int]) -> None:
    """The answer is these tokens, and its chunks are it."""
    result = recorder.result
    assert list(result.token_ids) == tokens
    assert "".join(chunk.text for chunk in recorder.parsed_chunks()) == result.text
    assert [token for chunk in recorder.parsed_chunks() for token in chunk.token_ids] == tokens
    assert recorder.begun == 1
    eos = plain.model.generation_config.eos_token_id
    ended = bool(tokens) and tokens[-1] == eos
    assert result.finish_reason == (pb.FINISH_REASON_STOP if ended else pb.FINISH_REASON_LENGTH)
    assert result.text == plain.tokenizer.decode(tokens, skip_special_tokens=True)


def test_greedy_and_penalised_answers_equal_transformers_in_any_company(engine: GenerateEngine, plain: Plain) -> None:
    lengths = [60, 7, 40, 1]
    expected = [plain.greedy(prompt, count) for prompt, count in zip(PROMPTS, lengths, strict=True)]
    for prompt, count, tokens in zip(PROMPTS, lengths, expected, strict=True):
        (alone,) = run_all(engine, [ask(prompt, max_tokens=count)])
        check(alone, plain, tokens)
        assert alone.result.prompt_tokens == len(plain.tokenizer(prompt)["input_ids"])
    asks = [ask(prompt, max_tokens=count) for prompt, count in zip(PROMPTS * 3, lengths * 3, strict=True)]
    for recorder, tokens in zip(run_all(engine, asks), expected * 3, strict=True):
        check(recorder, plain, tokens)
    (recorder,) = run_all(engine, [ask("one two one two", max_tokens=30, repetition_penalty=1.4)])
    tokens = plain.greedy("one two one two", 30, repetition_penalty=1.4)
    assert tokens != plain.greedy("one two one two", 30)
    check(recorder, plain, tokens)


def test_answer_ends_at_the_models_end_token(folder: Path, engine: GenerateEngine, plain: Plain) -> None:
    # A token that greedy decoding comes to is made the end.
    tokens = plain.greedy("Hello", 30)
    assert engine._model is not None
    before, config = engine._model.eos_ids, plain.model.generation_config
    engine._model.eos_ids = frozenset({tokens[12]})
    config.eos_token_id, was = tokens[12], config.eos_token_id
    try:
        cut = tokens[: tokens.index(tokens[12]) + 1]
        (recorder,) = run_all(engine, [ask("Hello", max_tokens=30)])
        result = recorder.result
        assert list(result.token_ids) == cut == plain.greedy("Hello", 30)
        assert result.finish_reason == pb.FINISH_REASON_STOP
        assert result.text == plain.tokenizer.decode(cut[:-1])
    finally:
        engine._model.eos_ids, config.eos_token_id = before, was


def test_sampled_answers_depend_on_the_seed_only(engine: GenerateEngine) -> None:
    def seeded(seed: int) -> Ask:
        return ask("Hello", max_tokens=30, temperature=0.9, top_p=0.95, top_k=50, seed=seed)

    (alone,) = run_all(engine, [seeded(5)])
    together = run_all(engine, [ask("x" * 100, max_tokens=20), seeded(5), seeded(6), seeded(5)])
    answers = [list(recorder.result.token_ids) for recorder in (alone, *together)]
    assert answers[0] == answers[2] == answers[4] != answers[3]
    assert all(not chunk.HasField("seed") for chunk in alone.parsed_chunks())
    unseeded = run_all(engine, [ask("Hello", max_tokens=30, temperature=0.9) for _ in range(2)])
    seeds = [recorder.parsed_chunks()[0].seed for recorder in unseeded]
    assert seeds[0] != seeds[1] and unseeded[0].result.token_ids != unseeded[1].result.token_ids
    assert not any(chunk.HasField("seed") for recorder in unseeded for chunk in recorder.parsed_chunks()[1:])
    (again,) = run_all(engine, [ask("Hello", max_tokens=30, temperature=0.9, seed=seeds[0])])
    assert again.result == unseeded[0].result


def test_answer_ends_before_its_stop_string(engine: GenerateEngine, plain: Plain) -> None:
    tokens = plain.greedy("Hello", 60)
    text = plain.tokenizer.decode(tokens)
    word = next(text[at : at + 3] for at in range(20, 50) if "\ufffd" not in text[at : at + 3])
    (recorder,) = run_all(engine, [ask("Hello", max_tokens=60, stop=["never there", word])])
    result = recorder.result
    assert result.text == "".join(chunk.text for chunk in recorder.parsed_chunks()) == text[: text.index(word)]
    assert result.finish_reason == pb.FINISH_REASON_STOP
    assert list(result.token_ids) == tokens[: len(result.token_ids)]


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"stop": ["qqqq", "\n\t"], "temperature": 0.8}])
def test_next_attempt_continues_after_the_last_chunk(engine: GenerateEngine, fields: dict[str, Any]) -> None:
    first = ask("Schöne", max_tokens=24, **fields)
    (whole,) = run_all(engine, [first])
    # 0: all reported chunks are lost and sent again.
    cuts = range(len(whole.chunks) + 1)
    assert len(cuts) > 5
    asks = [Ask(first.payload, tuple(whole.chunks[:cut]), task_id=1) for cut in cuts]
    for cut, recorder in zip(cuts, run_all(engine, asks), strict=True):
        assert recorder.result == whole.result
        assert whole.chunks[:cut] + recorder.chunks == whole.chunks
    # Every chunk but the result was reported: none is left.
    assert asks[-1].recorder.chunks == []


def test_foreign_chunks_are_rejected_and_missing_ones_generated_again(engine: GenerateEngine, plain: Plain) -> None:
    other = pb.GenerateChunk(text="something else", token_ids=plain.greedy("Hello", 3)).SerializeToString()
    first = ask("Hello", max_tokens=10)
    (recorder,) = run_all(engine, [Ask(first.payload, (other,))])
    assert recorder.outcome is not None
    assert recorder.outcome[0] == "BadInput" and "is not the one that began it" in recorder.outcome[1]
    first = ask("Hello", max_tokens=20, temperature=0.7)
    (whole,) = run_all(engine, [first])
    for count in (1, 5, len(whole.chunks)):
        item = Item(1, 1, 2, first.payload, 1, b"", count, ())
        batch, recorder = Batch("generate", "", {}, "", [item]), Recorder()
        engine.run(batch, engine.prepare(batch), recorder)
        assert whole.chunks[:count] + recorder.chunks == whole.chunks
        assert recorder.result == whole.result


def test_one_bad_task_fails_alone(engine: GenerateEngine, plain: Plain) -> None:
    asks = [ask("Hello", max_tokens=20), Ask(b"\xff\xff"), ask("x" * 600), ask(), ask("a", max_tokens=20)]
    recorders = run_all(engine, asks)
    check(recorders[0], plain, plain.greedy("Hello", 20))
    check(recorders[4], plain, plain.greedy("a", 20))
    for recorder in recorders[1:4]:
        assert recorder.outcome is not None and recorder.outcome[0] == "BadInput" and recorder.outcome[2] is False
    batch = Batch("generate", "", {"precision": "bf16"}, "", [Item(1, 1, 1, asks[0].payload, 1, b"", 0)])
    other = Recorder()
    engine.run(batch, engine.prepare(batch), other)
    message = "generate has no task parameter 'precision': name the precision in the model's model.toml"
    assert other.outcome == ("BadInput", message, False)


def test_cancelled_answer_stops_and_others_continue(engine: GenerateEngine, plain: Plain) -> None:
    gone = ask("Schöne", max_tokens=400)
    gone.recorder.cancel_after = 1
    recorders = run_all(engine, [ask("Hello", max_tokens=60), gone, ask("a", max_tokens=60)])
    check(recorders[0], plain, plain.greedy("Hello", 60))
    check(recorders[2], plain, plain.greedy("a", 60))
    assert gone.recorder.outcome is None and len(gone.recorder.chunks) == 1


def test_json_in_json_out(engine: GenerateEngine, plain: Plain) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    payload = json.dumps({"messages": messages, "max_tokens": 20, "temperature": 0.5}).encode()
    (recorder,) = run_all(engine, [Ask(payload, content_type=JSON)])
    assert recorder.outcome is not None and recorder.outcome[2] == JSON
    result = json.loads(recorder.outcome[1])
    chunks = [json.loads(chunk) for chunk in recorder.chunks]
    assert "".join(chunk.get("text", "") for chunk in chunks) == result["text"]
    expected = "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
    assert result["prompt_tokens"] == len(plain.tokenizer(expected)["input_ids"])
    (again,) = run_all(engine, [Ask(payload, tuple(recorder.chunks[:1]), JSON, task_id=1)])
    assert again.outcome is not None and json.loads(again.outcome[1]) == result
    (rejected,) = run_all(engine, [ask(messages=[{"role": "user", "content": "reject"}])])
    assert rejected.outcome is not None and "I reject" in rejected.outcome[1]


def test_bad_template_or_token_fails_alone(
    engine: GenerateEngine, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine._model
    assert model is not None
    messages = [{"role": "user", "content": "hi"}]
    for template, words in (("{{ nothing.at.all }}", "rejects"), ("{% if %}", "rejects"), ("", "no chat template")):
        monkeypatch.setattr(model.tokenizer, "chat_template", template)
        (rejected,) = run_all(engine, [ask(messages=messages)])
        assert rejected.outcome is not None and rejected.outcome[0] == "BadInput" and words in rejected.outcome[1]
    monkeypatch.setattr(model.tokenizer, "chat_template", "{# nothing #}")
    (empty,) = run_all(engine, [ask(messages=messages)])
    assert empty.outcome is not None and "no tokens" in empty.outcome[1]
    # A tokenizer that knows more than its model does; and an answer that such a one began.
    monkeypatch.setattr(model, "vocabulary", 258)
    began = pb.GenerateChunk(token_ids=[model.tokenizer.convert_tokens_to_ids("<|user|>")]).SerializeToString()
    asks = [ask("Hello <|assistant|>", max_tokens=5), ask("Hello", max_tokens=5), ask("Hello", max_tokens=5)]
    asks[1].partials = (began,)
    unknown, gone_on, well = run_all(engine, asks)
    for recorder in (unknown, gone_on):
        assert recorder.outcome is not None and "unknown to the model" in recorder.outcome[1]
    check(well, plain, plain.greedy("Hello", 5))


def test_long_prompt_does_not_delay_others(engine: GenerateEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[int]] = []
    model = engine._model
    assert model is not None
    forward = type(model).forward

    def watched(pieces: Any, wanted: Any) -> Any:
        steps.append([len(piece.token_ids) for piece in pieces])
        return forward(model, pieces, wanted)

    monkeypatch.setattr(engine._model.__class__, "forward", lambda _, pieces, wanted: watched(pieces, wanted))
    run_all(engine, [ask("a", max_tokens=300), ask("y" * 400, max_tokens=2), ask("z" * 30, max_tokens=2)])
    assert max(map(sum, steps)) <= 64
    mixed = [step for step in steps if len(step) > 1 and max(step) > 1]
    assert len(mixed) >= 4, "the long prompt never met the others"
    assert all(min(step) == 1 or len(step) == 3 for step in mixed[2:])


def test_last_sequence_waits_if_blocks_run_out(folder: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 2 KiB for 16 tokens there are 20 blocks: room for about three of these six.
    settings = settings_of(folder, slots=6, parameters={"cache_bytes": str(20 * 16 * 256)})
    engine = GenerateEngine(settings)
    assert engine.load()["context"] == "320 tokens"
    scheduler = engine._runner
    assert scheduler is not None
    interrupted = []
    interrupt = scheduler._interrupt

    def watched(sequence: Any) -> None:
        interrupted.append(sequence.item.lease_id)
        interrupt(sequence)

    monkeypatch.setattr(scheduler, "_interrupt", watched)
    prompts = [f"{at} {PROMPTS[at % 4]}" for at in range(6)]
    for prompt, recorder in zip(prompts, run_all(engine, [ask(p, max_tokens=90) for p in prompts]), strict=True):
        check(recorder, plain, plain.greedy(prompt, 90))
    assert interrupted, "there was room for all"
    assert scheduler._pool.used == 0
    (full,) = run_all(engine, [ask("n" * 200, max_tokens=120)])
    check(full, plain, plain.greedy("n" * 200, 120))
    engine.close()


def test_out_of_memory_shrinks_steps_not_answers(folder: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GenerateEngine(settings_of(folder))
    engine.load()
    model, scheduler = engine._model, engine._runner
    assert model is not None and scheduler is not None
    forward = type(model).forward
    room = {"tokens": 20, "sequences": 2}
    rejected = []

    def short(self: Any, pieces: Any, wanted: Any) -> Any:
        if sum(len(piece.token_ids) for piece in pieces) > room["tokens"] or len(pieces) > room["sequences"]:
            rejected.append(len(pieces))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(self, pieces, wanted)

    monkeypatch.setattr(type(model), "forward", short)
    asks = [ask(prompt, max_tokens=60) for prompt in PROMPTS]
    for prompt, recorder in zip(PROMPTS, run_all(engine, asks), strict=True):
        check(recorder, plain, plain.greedy(prompt, 60))
    assert scheduler._step_tokens == 16 and scheduler._pool.blocks_max < model.cache.blocks
    found_out = len(rejected)
    run_all(engine, [ask("b" * 50, max_tokens=5)])
    assert len(rejected) == found_out, "the shortage was forgotten"
    room["tokens"] = 0
    (hopeless,) = run_all(engine, [ask("Hello", max_tokens=5)])
    assert hopeless.outcome is not None and hopeless.outcome[::2] == ("OutOfMemory", True)
    room["tokens"] = 20
    (well,) = run_all(engine, [ask("Hello", max_tokens=5)])
    check(well, plain, plain.greedy("Hello", 5))
    engine.close()


def test_failed_step_fails_only_its_cause(
    engine: GenerateEngine, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = type(engine._model).forward  # type: ignore[union-attr]
    expected = [plain.greedy(prompt, 12) for prompt in ("Hello", "a")]
    mark = next(mark for mark in "!?#%&" if plain.tokenizer(mark)["input_ids"][0] not in {*expected[0], *expected[1]})
    (poison,) = plain.tokenizer(mark)["input_ids"]
    steps: list[int] = []

    def broken(self: Any, pieces: Any, wanted: Any) -> Any:
        steps.append(len(pieces))
        if any(poison in piece.token_ids for piece in pieces):
            raise IndexError("a token that the model has no row for")
        return forward(self, pieces, wanted)

    asks = [ask(prompt, max_tokens=12) for prompt in ("Hello", "x" * 70 + mark, "a", mark)]
    with monkeypatch.context() as patch:
        patch.setattr(type(engine._model), "forward", broken)
        with pytest.raises(IndexError, match="no row"):
            run_all(engine, asks)
    check(asks[0].recorder, plain, expected[0])
    check(asks[2].recorder, plain, expected[1])
    assert asks[1].recorder.outcome is None and asks[3].recorder.outcome is None
    assert steps.index(1) < len(steps) - steps[::-1].index(2), "they were not together again"
    (well,) = run_all(engine, [ask("Hello", max_tokens=5)])
    check(well, plain, plain.greedy("Hello", 5))


def test_lost_context_is_reported_by_one_sequence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = GenerateEngine(settings_of(folder))
    engine.load()
    monkeypatch.setattr(type(engine._model), "forward", lost)
    errors: list[str] = []

    def run(each: Ask) -> None:
        item = Item(1, 1, 1, each.payload, 1, b"", 0)
        batch = Batch("generate", "", {}, "", [item])
        try:
            engine.run(batch, engine.prepare(batch), each.recorder)
        except RuntimeError as error:
            errors.append(str(error))
            failed.set()

    failed = threading.Event()
    asks = [ask("Hello", max_tokens=5) for _ in range(3)]
    threads = [threading.Thread(target=run, args=(each,)) for each in asks]
    for thread in threads:
        thread.start()
    assert failed.wait(PATIENCE_S)
    failed.clear()
    assert len(errors) == 1 and "illegal memory access" in errors[0]
    assert sum(thread.is_alive() for thread in threads) >= 2
    engine.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors[1:] == ["the engine was closed"] * 2
    assert all(each.recorder.outcome is None for each in asks)


def test_nan_logits_fail_one_sequence(engine: GenerateEngine, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = type(engine._model).forward  # type: ignore[union-attr]

    def poisoned(self: Any, pieces: Any, wanted: Any) -> Any:
        logits = forward(self, pieces, wanted)
        for row, at in enumerate(wanted):
            if pieces[at].token_ids[0] == plain.tokenizer("!")["input_ids"][0]:
                logits[row] = float("nan")
        return logits

    monkeypatch.setattr(type(engine._model), "forward", poisoned)
    well, sick = run_all(engine, [ask("Hello", max_tokens=5), ask("!", max_tokens=5)])
    assert sick.outcome is not None and sick.outcome[0] == "NotANumber"
    check(well, plain, plain.greedy("Hello", 5))
