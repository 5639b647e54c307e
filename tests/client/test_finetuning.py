"""Jobs that fine-tune, as values."""

import json
from pathlib import Path
from typing import Any

import pytest
from multigpu._encoding import encode
from multigpu._kinds.finetuning import ATTEMPTS_MAX, Finetune, TextsError, finetune_of, read_texts
from multigpu._kinds.training import job_of, read_payload


def test_a_job_survives_its_payload() -> None:
    options = {"world_size": 2, "epochs": 1, "method": "lora", "queue": "nights", "attempts_max": 5}
    tuning, rest = finetune_of("chat:3", ["one", "zwö"], "", options)
    assert rest == {"world_size": 2, "queue": "nights", "attempts_max": 5}
    job = job_of("", (), "", 0, "", 0.0, rest, tuning)
    assert job.name.startswith("chat-3-")
    payload, content_type = encode(job.payload())
    read = read_payload(payload, content_type)
    assert read == job
    assert read.finetune is not None
    assert [json.loads(line)["text"] for line in read.finetune.texts.splitlines()] == ["one", "zwö"]
    kept = job.without_texts()
    assert kept.finetune == Finetune(model="chat:3", epochs=1, method="lora")
    assert kept.options == job.options


def test_each_halving_is_an_attempt() -> None:
    assert finetune_of("m", ["x"], "", {})[1] == {"attempts_max": ATTEMPTS_MAX}


@pytest.mark.parametrize(
    ("texts", "file", "options", "error", "says"),
    [
        ("abc", "", {}, TypeError, "not a str"),
        ([1], "", {}, TypeError, "a text is a str, not int"),
        ([], "", {}, ValueError, "give texts, or a file"),
        (["x"], "y.jsonl", {}, ValueError, "not both"),
        (["x"], "", {"method": "qlora"}, ValueError, "method is 'qlora'; it must be full, lora"),
        (["x"], "", {"strategy": "fsdp"}, ValueError, "strategy is 'fsdp'"),
        (["x"], "", {"precision": "int8"}, ValueError, "precision is 'int8'"),
        (["x"], "", {"epochs": 0}, ValueError, "epochs is 0"),
        (["x"], "", {"epochs": float("nan")}, TypeError, "epochs must be a number"),
        (["x"], "", {"batch": 8.0}, TypeError, "batch must be an int, not 8.0"),
        (["x"], "", {"batch": True}, TypeError, "batch must be an int, not True"),
        (["x"], "", {"learning_rate": "1e-3"}, TypeError, "learning_rate must be a number"),
        (["x"], "", {"learning_rate": -1}, ValueError, "learning_rate is -1"),
        (["x"], "", {"memory_fraction": 1.5}, ValueError, "memory_fraction is 1.5"),
        (["x"], "", {"epoch": 3}, TypeError, "no option 'epoch'; did you mean 'epochs'"),
        (["x"], "", {"max_in_flight": 3}, TypeError, "there are queue, priority"),
        (["x"], "", {"output": 3}, TypeError, "output must be a str"),
        (["x"], "", {"world_size": 0}, ValueError, "world_size is 0; it must be at least 1"),
        (["x"], "", {"world_size": -2}, ValueError, "world_size is -2"),
        (["x"], "", {"world_size": "2"}, TypeError, "world_size must be an int, not '2'"),
        (["x"], "", {"strategy": "dp", "world_size": 2}, ValueError, "one process"),
        (["x"], "", {"batch": 8, "world_size": 3}, ValueError, "8 can't be divided among 3 ranks"),
        (["x"], "", {"batch": 8, "world_size": 2, "accumulation": 3}, ValueError, "2 ranks and 3 passes"),
        (["x"], "", {"patience": 2, "evaluation_fraction": 0}, ValueError, "patience needs texts"),
    ],
)
def test_what_cannot_be_trained_is_rejected(
    texts: Any, file: str, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        finetune_of("chat", texts, file, options)


def test_a_model_is_needed() -> None:
    with pytest.raises(ValueError, match="model is empty"):
        finetune_of("", ["x"], "", {})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"finetune": {"model": "chat"}}, "finetune is a JSON object with"),
        ({"finetune": None}, "path is empty"),
        ({"script": "x.py"}, "path is empty"),
        ({"checkpoints": "/x"}, "in its folder"),
    ],
)
def test_what_is_no_payload_is_rejected(changes: dict[str, Any], says: str) -> None:
    tuning, rest = finetune_of("chat", ["x"], "", {})
    payload, content_type = encode(job_of("", (), "night", 0, "", 0.0, rest, tuning).payload() | changes)
    with pytest.raises(ValueError, match=says):
        read_payload(payload, content_type)


def test_texts_are_strings_or_objects_with_text(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('"one"\n\n{"text": "two", "more": 1}\n')
    assert read_texts(file) == ["one", "two"]


def test_a_file_that_is_not_utf_8_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes(b'"one"\n"\xff"\n')
    with pytest.raises(TextsError, match=r"t\.jsonl line 2 is not UTF-8"):
        read_texts(file)


@pytest.mark.parametrize("line", ["plain", '{"txt": "x"}', '{"text": 3}', "[1]", "3"])
def test_a_line_that_is_no_text_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(f'"one"\n{line}\n')
    with pytest.raises(TextsError, match=r"t\.jsonl line 2 is neither"):
        read_texts(file)
