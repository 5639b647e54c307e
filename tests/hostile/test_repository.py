"""Hostile folders in a model repository: each hides itself only, and the worker's reports stay valid."""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hostile.targets.repository import GOOD, Worker, gguf, gguf_strings, language_model, put, put_good, tensor


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def sparse_strings(root: Path) -> None:
    """An array of 2^34 empty strings, in a sparse file of 128 GiB."""
    put(root / "bad", {"m.gguf": gguf(gguf_strings(1 << 34), facts_count=1)})
    os.truncate(root / "bad/m.gguf", 128 << 30)


def fifo(root: Path) -> None:
    """A pipe, which blocks its reader."""
    put(root / "bad", language_model() | {"model.toml": b'source = "huggingface"'})
    (root / "bad/config.json").unlink()
    os.mkfifo(root / "bad/config.json")


def named(name: str) -> Callable[[Path], None]:
    return lambda root: put(root / name, language_model())


def holding(files: dict[str, bytes]) -> Callable[[Path], None]:
    return lambda root: put(root / "bad", files)


HUGE = [1 << 62, 1 << 62]
HOSTILE: dict[str, Callable[[Path], None]] = {
    "escape in a name": named("\x1b[2J"),
    "change of direction in a name": named("a\u202eb"),
    "name that begins with a colon": named(":x"),
    "name of many bytes": named("/".join("x" * 150 for _ in range(2))),
    "shape of a tensor": holding(language_model(header={"t": tensor(HUGE, [0, 16])}, size=16)),
    "offsets of a tensor": holding(language_model(header={"t": tensor([1], [0, math.inf])}, size=16)),
    "offset below zero": holding(language_model(header={"t": tensor([1], [-(1 << 70), 16], "I8")}, size=16)),
    "infinity in config.json": holding(language_model({"num_hidden_layers": math.inf})),
    "dimension in GGUF": holding({"m.gguf": gguf(dimensions=(1 << 63, 1 << 63))}),
    "strings without end in GGUF": sparse_strings,
    "labels in model.toml": holding(language_model() | {"model.toml": b"labels = { a = '%s' }" % (b"x" * 200_000)}),
    "key in model.toml": holding(language_model() | {"model.toml": b"%s = 1" % (b"x" * 200_000)}),
    "engine in model.toml": holding(language_model() | {"model.toml": b"engine = '%s:B'" % (b"x" * 200_000)}),
    "config.json that is a pipe": fifo,
    "folder that looks like a version": lambda root: put(root / "1", {"x": b""}),
    "model.toml beside the models": lambda root: put(root, {"model.toml": b""}),
}


@pytest.mark.parametrize("harm", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_folder_hides_only_itself(tmp_path: Path, worker: Worker, harm: Callable[[Path], None]) -> None:
    put_good(tmp_path)
    harm(tmp_path)
    names, _ = worker.report(tmp_path)
    assert GOOD in names
    assert all(name.isprintable() for name in names)


def test_a_catalog_that_does_not_fit_is_sent_in_part(tmp_path: Path, worker: Worker) -> None:
    put_good(tmp_path)
    for number in range(2000):
        put(tmp_path / f"m{number:04}", language_model())
    names, _ = worker.report(tmp_path)
    assert 300 < len(names) < 2000
    assert "m0000" in names, "the default model comes first"


def test_a_model_with_large_labels_does_not_displace_others(tmp_path: Path, worker: Worker) -> None:
    """Labels of 20 models that fill a hello together: the 300 small models stay."""
    for number in range(20):
        labels = json.dumps("x" * 8000)
        put(tmp_path / f"a{number:03}", language_model() | {"model.toml": f"labels = {{ a = {labels} }}".encode()})
    for number in range(300):
        put(tmp_path / f"m{number:03}", language_model())
    names, _ = worker.report(tmp_path)
    assert {f"m{number:03}" for number in range(300)} <= names


def test_the_error_of_a_folder_is_listed_under_a_name_that_can_be_shown(tmp_path: Path, worker: Worker) -> None:
    put_good(tmp_path)
    put(tmp_path / "\x1b[2J:x", language_model())
    put(tmp_path / ("y" * 250), language_model())
    _, errors = worker.report(tmp_path)
    assert r"\x1b[2J\x3ax" in errors
    assert all(text.isprintable() for text in (*errors, *errors.values()))
    assert any(name.startswith("yyy") for name in errors)


def test_a_folder_that_is_not_there_and_an_empty_file_are_errors(tmp_path: Path, worker: Worker) -> None:
    put_good(tmp_path)
    (tmp_path / "away").symlink_to(tmp_path / "not mounted")
    put(tmp_path / "empty", {"m.onnx": b""})
    names, errors = worker.report(tmp_path)
    assert names.isdisjoint({"away", "empty"})
    assert "which is not there: is a disk not mounted?" in errors["away"]
    assert "is empty: copy it again" in errors["empty"]


@pytest.mark.parametrize(
    "model", [{"model.toml": b""}, {"m.onnx": b"x"}, language_model()], ids=["none", "ONNX", "llama"]
)
def test_python_in_a_folder_does_not_run(tmp_path: Path, worker: Worker, model: dict[str, bytes]) -> None:
    put_good(tmp_path)
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'told')!r}).touch()".encode()
    put(tmp_path / "bad", model | dict.fromkeys(("engine.py", "modeling.py", "__init__.py", "torch.py"), code))
    names, errors = worker.report(tmp_path)
    if "model.toml" in model:
        assert 'has custom code: name its class in model.toml: engine = "module:Class"' in errors["bad"]
    else:
        assert "bad" in names
    assert not (tmp_path / "told").exists()
