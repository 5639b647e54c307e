"""Measured model sizes that survive restarts; a damaged file has no size."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from multigpu_worker.models import measured_sizes
from multigpu_worker.models.measured_sizes import FOLDER, MeasuredSizes, ModelSize
from multigpu_worker.repository.model import ModelSpec
from multigpu_worker.repository.signature import NamedTensor, Signature
from structlog.testing import capture_logs

SIZE = ModelSize(measured=True, memory_bytes=123 << 20, load_s=1.5)
SPEC = ModelSpec(name="m", version="1", folder=Path("/srv/m/1"), files_bytes=10, changed_ns=5)


def sizes(folder: Path, **made_with: str) -> MeasuredSizes:
    return MeasuredSizes(folder, {"device": "a cpu", **made_with})


def only_file(folder: Path) -> Path:
    (path,) = (folder / FOLDER).iterdir()
    return path


def test_a_measured_size_survives_a_restart(tmp_path: Path) -> None:
    assert sizes(tmp_path / "new").find(SPEC) is None
    assert not (tmp_path / "new").exists(), "`find` creates nothing"
    sizes(tmp_path / "new").keep(SPEC, SIZE)
    moved = dataclasses.replace(SPEC, folder=Path("/elsewhere"), labels={"team": "b"})
    assert sizes(tmp_path / "new").find(SPEC) == sizes(tmp_path / "new").find(moved) == SIZE
    again = ModelSize(measured=True, memory_bytes=1, load_s=0.0)
    sizes(tmp_path / "new").keep(SPEC, again)
    assert sizes(tmp_path / "new").find(SPEC) == again
    only_file(tmp_path / "new")


def test_inputs_and_outputs_survive_with_the_size(tmp_path: Path) -> None:
    x = NamedTensor(name="x", dtype="float32", shape=(-1, 3))
    y = NamedTensor(name="y", dtype="", shape=(), optional=True)
    known = dataclasses.replace(SIZE, signature=Signature(inputs=(x, y), outputs=(x,)))
    sizes(tmp_path).keep(SPEC, known)
    assert sizes(tmp_path).find(SPEC) == known
    # A file of an earlier version has none.
    values = json.loads(only_file(tmp_path).read_bytes())
    del values["signature"]
    only_file(tmp_path).write_text(json.dumps(values))
    assert sizes(tmp_path).find(SPEC) == SIZE


@pytest.mark.parametrize("signature", [[], [[]], [[1], []], [[["x", "int8", [-2], False]], []], [[["x"] * 1001], []]])
def test_a_damaged_signature_is_a_damaged_file(tmp_path: Path, signature: Any) -> None:
    sizes(tmp_path).keep(SPEC, SIZE)
    values = json.loads(only_file(tmp_path).read_bytes()) | {"signature": signature}
    only_file(tmp_path).write_text(json.dumps(values))
    with capture_logs() as logs:
        assert sizes(tmp_path).find(SPEC) is None
    assert [entry["event"] for entry in logs] == ["what a model took before can't be read"]


def test_another_version_file_precision_or_device_is_measured_separately(tmp_path: Path) -> None:
    sizes(tmp_path).keep(SPEC, SIZE)
    changes: dict[str, Any] = {
        "name": "n",
        "version": "2",
        "precision": "bf16",
        "engine": "onnx",
        "instances": 2,
        "files_bytes": 11,
    }
    changes |= {"changed_ns": 6, "parameters": {"size": "1"}}
    for name, value in changes.items():
        assert sizes(tmp_path).find(dataclasses.replace(SPEC, **{name: value})) is None, name
    assert sizes(tmp_path, device="a GPU").find(SPEC) is None


WHOLE = b'{"memory_bytes": 1, "load_s": 1}'
DAMAGED = [b"", WHOLE[:-5], b"\xff\x00", b"[]", b"{}", b"[" * 4000]
WRONG = (b"0", b"-1", b'"x"', b"NaN", b"null", b"1e999", b"9" * 20)
DAMAGED += [WHOLE.replace(b'bytes": 1', b'bytes": ' + value) for value in WRONG]
DAMAGED += [WHOLE.replace(b'load_s": 1', b'load_s": ' + value) for value in (b"-1", b'""', b"NaN", b"1e999")]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_ignored_and_replaced(tmp_path: Path, content: bytes) -> None:
    sizes(tmp_path).keep(SPEC, SIZE)
    path = only_file(tmp_path)
    path.write_bytes(content)
    with capture_logs() as lines:
        assert sizes(tmp_path).find(SPEC) is None
    assert [(line["log_level"], line["model"]) for line in lines] == [("warning", "m:1")]
    sizes(tmp_path).keep(SPEC, SIZE)
    assert sizes(tmp_path).find(SPEC) == SIZE


def test_the_oldest_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_sizes, "KEPT_MAX", 3)
    kept = sizes(tmp_path)
    specs = [dataclasses.replace(SPEC, version=str(n)) for n in range(5)]
    for nth, spec in enumerate(specs):
        before = set((tmp_path / FOLDER).iterdir()) if nth else set()
        kept.keep(spec, SIZE)
        for path in set((tmp_path / FOLDER).iterdir()) - before:
            os.utime(path, (nth, nth))
    assert [kept.find(spec) is not None for spec in specs] == [False, False, True, True, True]


def test_an_unusable_folder_or_a_full_disk_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FOLDER).write_text("a file stands in the way")
    with capture_logs() as lines:
        sizes(tmp_path).keep(SPEC, SIZE)
        assert sizes(tmp_path).find(SPEC) is None
    assert {line["log_level"] for line in lines} == {"warning"}
    sizes(tmp_path / "full").keep(SPEC, SIZE)

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with capture_logs() as lines:
        sizes(tmp_path / "full").keep(SPEC, ModelSize(measured=True, memory_bytes=1, load_s=0.0))
    assert "No space left" in lines[0]["error"]
    assert sizes(tmp_path / "full").find(SPEC) == SIZE
    only_file(tmp_path / "full")
