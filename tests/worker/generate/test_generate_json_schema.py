"""Answers under a JSON schema. The model has random weights, so nothing but the schema makes its answers JSON."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("transformers", reason="the extra `worker` is not installed")
pytest.importorskip("llguidance", reason="the extra `worker` is not installed")

import torch
from multigpu.v1 import generate_pb2 as pb
from multigpu_worker.engines.base import Batch, Item
from multigpu_worker.engines.generate import json_schema as under_test
from multigpu_worker.engines.generate.engine import GenerateEngine
from multigpu_worker.engines.generate.json_schema import Masks, Matcher

from tests.worker.generate.generating import Ask, Plain, Recorder, ask, run_all, settings_of
from tests.worker.generate.test_generate import check, engine, folder, loaded, plain
from tests.worker.generate.tiny_llama import save_tiny_llama

__all__ = ["engine", "folder", "loaded", "plain"]


def text(**limits: Any) -> dict[str, Any]:
    return {"type": "string", **limits}


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": text(maxLength=6),
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["good", "bad", None]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    return (
        {"name", "age"} <= set(value) <= {"name", "age", "mood"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and value.get("mood") in ("good", "bad", None)
    )


def is_list(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 3 and all(each in (True, False, "é") for each in value)


SCHEMAS: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "object": (PERSON, is_person),
    "array": ({"type": "array", "items": {"enum": [True, False, "é"]}, "minItems": 1, "maxItems": 3}, is_list),
    "string": (text(minLength=3, maxLength=9), lambda value: isinstance(value, str) and 3 <= len(value) <= 9),
    "pattern": (text(pattern="^[a-c]{2,5}$"), lambda value: 2 <= len(value) <= 5 and set(value) <= set("abc")),
    "choice": ({"anyOf": [{"const": "yes"}, PERSON]}, lambda value: value == "yes" or is_person(value)),
    "reference": (
        {"$defs": {"p": PERSON}, "type": "array", "items": {"$ref": "#/$defs/p"}, "minItems": 1, "maxItems": 1},
        lambda value: len(value) == 1 and is_person(value[0]),
    ),
    "integer": ({"type": "integer", "minimum": -5, "maximum": 70}, lambda value: -5 <= value <= 70),
}


def constrained(schema: Any, **fields: Any) -> Ask:
    return ask("Hello", **{"max_tokens": 400, "json_schema": json.dumps(schema), **fields})


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_matches_its_schema(engine: GenerateEngine, plain: Plain, name: str) -> None:
    schema, matches = SCHEMAS[name]
    settings: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.5}]
    settings += [{"temperature": 1.0 + seed / 8, "seed": seed} for seed in range(8)]
    settings += [{"temperature": 2.0, "top_k": 2, "top_p": 0.5, "seed": 1}]
    asks = [constrained(schema, **each) for each in settings]
    free = ask("Hello", max_tokens=60)
    *recorders, other = run_all(engine, [*asks, free])
    check(other, plain, plain.greedy("Hello", 60))
    answers = set()
    for recorder in recorders:
        result = recorder.result
        assert result.finish_reason == pb.FINISH_REASON_STOP
        value = json.loads(result.text)
        assert matches(value), result.text
        if name == "object":
            # Nothing can follow its last bracket, so the engine does not wait for an end token.
            assert plain.tokenizer.eos_token_id not in result.token_ids
        assert "".join(chunk.text for chunk in recorder.parsed_chunks()) == result.text
        answers.add(result.text)
    assert len(answers) > 1, "the schema leaves the model no choice"
    (alone,) = run_all(engine, [Ask(asks[4].payload)])
    assert alone.result == recorders[4].result


def test_an_end_token_may_end_an_answer_that_may_also_continue(
    engine: GenerateEngine, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine._model is not None
    forward, eos = type(engine._model).forward, plain.tokenizer.eos_token_id

    def eager(self: Any, pieces: Any, wanted: Any) -> Any:
        """The likeliest token is always the end."""
        logits = forward(self, pieces, wanted)
        logits[:, eos] = 1000
        return logits

    monkeypatch.setattr(type(engine._model), "forward", eager)
    integer, person = run_all(engine, [constrained({"type": "integer"}), constrained(PERSON)])
    assert integer.result.token_ids[-1] == eos and len(integer.result.token_ids) >= 2
    assert type(json.loads(integer.result.text)) is int
    # It ends where it is complete, not before.
    assert is_person(json.loads(person.result.text))
    assert integer.result.finish_reason == person.result.finish_reason == pb.FINISH_REASON_STOP


def test_max_tokens_and_stop_strings_end_an_answer_early(engine: GenerateEngine) -> None:
    short, stopped = run_all(engine, [constrained(PERSON, max_tokens=3), constrained(PERSON, stop=['"'])])
    assert short.result.finish_reason == pb.FINISH_REASON_LENGTH and len(short.result.token_ids) == 3
    assert stopped.result.finish_reason == pb.FINISH_REASON_STOP and '"' not in stopped.result.text


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.2, "logprobs": 1}])
def test_next_attempt_continues_under_the_schema(engine: GenerateEngine, fields: dict[str, Any]) -> None:
    first = constrained(PERSON, **fields)
    (whole,) = run_all(engine, [first])
    cuts = range(len(whole.chunks) + 1)
    assert len(cuts) > 5
    asks = [Ask(first.payload, tuple(whole.chunks[:cut]), task_id=1) for cut in cuts]
    for cut, recorder in zip(cuts, run_all(engine, asks), strict=True):
        result, expected = recorder.result, whole.result
        assert (result.text, result.finish_reason) == (expected.text, expected.finish_reason)
        assert result.token_ids == expected.token_ids
        assert len(recorder.chunks) == len(whole.chunks) - cut
        ours, theirs = ([each.logprob for each in one.logprobs] for one in (result, expected))
        assert ours == pytest.approx(theirs, abs=1e-4)
    item = Item(1, 1, 2, first.payload, 1, b"", 2, ())
    batch, lost = Batch("generate", "", {}, "", [item]), Recorder()
    engine.run(batch, engine.prepare(batch), lost)
    assert lost.result.text == whole.result.text
    # An answer that the schema does not allow was not begun by this engine.
    foreign = run_all(engine, [ask("Hello", max_tokens=3)])[0].chunks
    (rejected,) = run_all(engine, [Ask(constrained(PERSON).payload, tuple(foreign), task_id=1)])
    assert rejected.outcome is not None and rejected.outcome[0] == "BadInput"
    assert "token 1 of the answer can't be matched" in rejected.outcome[1]


def test_interrupted_answers_match_too(folder: Path) -> None:
    engine = GenerateEngine(settings_of(folder, slots=6, parameters={"cache_bytes": str(9 * 16 * 256)}))
    engine.load()
    interrupted = []
    scheduler = engine._runner
    assert scheduler is not None
    interrupt = scheduler._interrupt

    def watched(sequence: Any) -> None:
        interrupted.append(sequence)
        interrupt(sequence)

    scheduler._interrupt = watched  # type: ignore[method-assign]
    schema = text(minLength=50, maxLength=50, pattern="^[a-z]*$")
    for recorder in run_all(
        engine, [constrained(schema, max_tokens=100, temperature=1.0, seed=seed) for seed in range(5)]
    ):
        assert len(json.loads(recorder.result.text)) == 50
    assert interrupted, "there was room for all"
    engine.close()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"type": "nope"}', "Invalid type: nope"),
        ('{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        ('{"not": {"type": "string"}, "x-guidance": {"lenient": true}}', 'Unimplemented keys: ["not"]'),
        ("false", "json_schema is no schema: send a JSON object"),
        ('{"type": "integer", "minimum": 5, "maximum": 3}', "minimum (5) is greater than maximum (3)"),
        ('{"$ref": "#/nope"}', "'/nope' does not exist"),
        ('{"$ref": "http://example.com/schema"}', "does not fetch"),
        ('{"type": "string", "pattern": "(?=a)b"}', "regex parse error: (?=a)b ^^^ error: look-around"),
        ('{"type": "object", "properties": 5}', "json_schema is no schema"),
        ('{"type"', "json_schema is no JSON"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_rejected(engine: GenerateEngine, schema: str, words: str) -> None:
    bad, well = run_all(engine, [ask("Hello", json_schema=schema), constrained({"type": "boolean"})])
    assert bad.outcome is not None and bad.outcome[0] == "BadInput" and bad.outcome[2] is False
    assert words in bad.outcome[1] and "json_schema" in bad.outcome[1]
    assert well.result.text in ("true", "false")


def test_a_limit_of_the_matcher_fails_only_its_task(
    engine: GenerateEngine, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llguidance import LLParserLimits

    limits = LLParserLimits(step_lexer_fuel=1, step_max_items=1, verbose_errors=False)
    monkeypatch.setattr("llguidance.LLParserLimits", lambda **_: limits)
    bad, well = run_all(engine, [constrained(PERSON), ask("Hello", max_tokens=20)])
    assert bad.outcome is not None and bad.outcome[0] == "BadInput" and "simplify the schema" in bad.outcome[1]
    check(well, plain, plain.greedy("Hello", 20))


def test_the_tokenizer_is_built_once_at_the_first_schema(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance.hf

    built = []
    build = llguidance.hf.from_tokenizer

    def watched(*args: Any, **fields: Any) -> Any:
        built.append(args)
        return build(*args, **fields)

    monkeypatch.setattr(llguidance.hf, "from_tokenizer", watched)
    engine = GenerateEngine(settings_of(folder))
    engine.load()
    run_all(engine, [ask("Hello", max_tokens=3)])
    assert not built
    run_all(engine, [constrained({"type": "boolean"}) for _ in range(4)])
    assert len(built) == 1
    engine.close()


def test_models_without_end_token_or_usable_tokenizer_reject_schemas(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(path: Path, words: str) -> None:
        engine = GenerateEngine(settings_of(path))
        engine.load()
        bad, well = run_all(engine, [constrained({"type": "boolean"}), ask("Hello", max_tokens=3)])
        assert bad.outcome is not None and bad.outcome[0] == "BadInput" and words in bad.outcome[1]
        assert len(well.result.token_ids) == 3
        engine.close()

    save_tiny_llama(tmp_path, endless=True)
    reject(tmp_path, "no end token")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llguidance.hf", None)
        reject(folder, "pip install 'multigpu[worker]'")

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("unknown decoder\nmore")

    monkeypatch.setattr("llguidance.hf.from_tokenizer", broken)
    reject(folder, "model's tokenizer (unknown decoder more)")


def test_masks_apply_to_their_rows_and_forbid_tokens_past_their_end() -> None:
    logits = torch.zeros(3, 70)
    words = torch.tensor([[1 << 4, -(1 << 31)]], dtype=torch.int32)
    Masks([1], words).apply(logits)
    assert logits[1].isfinite().nonzero().flatten().tolist() == [4, 63]
    assert bool(logits[[0, 2]].isfinite().all())
    # A tokenizer may have more tokens than the model.
    logits = torch.zeros(1, 40)
    Masks([0], words).apply(logits)
    assert logits[0].isfinite().nonzero().flatten().tolist() == [4]


def test_steps_without_schema_have_no_mask(engine: GenerateEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a mask was computed")

    monkeypatch.setattr(Matcher, "fill", never)
    monkeypatch.setattr(Masks, "apply", never)
    assert under_test.masks_of([None, None]) is None
    run_all(engine, [ask("Hello", max_tokens=5), ask("a", max_tokens=5, temperature=1.0)])
