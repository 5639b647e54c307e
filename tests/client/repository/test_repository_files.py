"""The files of models: links out of the repository, the files that are loaded, digests, and hashes in model.toml."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from multigpu.repository.files import (
    Problem,
    check_safetensors,
    digest,
    file_hash,
    loaded_files,
    require_hashes,
    verify,
)
from multigpu.repository.hashes import write_hashes
from multigpu.repository.model import ModelFolderError, ModelSpec
from multigpu.repository.scan import read_model, scan

from tests.client.repository.test_repository import EMPTY, MINI, hugging_face, only, put, under

PLAIN = hugging_face()


def test_links_out_of_the_repository_are_rejected(tmp_path: Path) -> None:
    put(tmp_path, under("repository.old/m", PLAIN))
    root = tmp_path / "repository"
    put(root, under("inside", PLAIN))
    (root / "folder").symlink_to(tmp_path / "repository.old/m")
    put(root, {"file/config.json": "{}"})
    (root / "file/model.safetensors").symlink_to(tmp_path / "repository.old/m/model.safetensors")
    put(root, {"side/model.onnx": ""})
    (root / "side/data").symlink_to(tmp_path / "repository.old")
    (root / "alias").symlink_to("inside")
    put(root, {"loop/x/notes": ""})
    (root / "loop/x/up").symlink_to("..")
    found = scan(root)
    assert sorted(found.models) == ["alias", "inside"]
    assert set(found.errors) == {"folder", "file", "side", "loop/x/up"}
    for name in ("folder", "file"):
        assert "is a link out of the repository" in found.errors[name]
    specs, _ = read_model(root / "file", "file", None)
    assert [spec.name for spec in specs] == ["file"], "who configures a folder by name chose its links as well"


def test_loaded_files(tmp_path: Path) -> None:
    more: dict[str, str | bytes] = {"tf_model.h5": "", "pytorch_model.bin": "", "onnx/model.onnx": "", "README.md": ""}
    put(tmp_path, under("m", MINI | more | {"model.toml": ""}))
    spec = only(scan(tmp_path))
    assert loaded_files(spec) == [
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "config.json",
        "model.safetensors",
        "modules.json",
        "tokenizer.json",
    ]
    assert spec.files_bytes == sum((tmp_path / "m" / name).stat().st_size for name in loaded_files(spec))
    put(tmp_path, under("net", {"net.onnx": "x", "deep/data": "", ".git/x": "", "model.toml": ""}))
    assert loaded_files(scan(tmp_path).models["net"]) == ["deep/data", "net.onnx"]


def grown(folder: Path) -> None:
    put(folder, {"2_Dense/model.safetensors": EMPTY.replace(b"  ", b"\n\n")})


def renamed(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokens.json")


@pytest.mark.parametrize("change", [grown, renamed])
def test_the_digest_follows_content_and_names(tmp_path: Path, change: Callable[[Path], None]) -> None:
    put(tmp_path, under("a", MINI) | under("b", MINI))
    found = scan(tmp_path).models
    before = digest(found["a"])
    assert before == digest(found["b"]) == digest(found["a"])
    change(tmp_path / "a")
    assert digest(scan(tmp_path).models["a"]) != before


def test_a_file_replaced_at_once_is_read_again(tmp_path: Path) -> None:
    """Same size, name and modification time."""
    put(tmp_path, {"m/model.gguf": "1"})
    spec = only(scan(tmp_path))
    stamp = (tmp_path / "m/model.gguf").stat().st_mtime_ns
    before = digest(spec)
    put(tmp_path, {"m/model.gguf": "2"})
    os.utime(tmp_path / "m/model.gguf", ns=(stamp, stamp))
    assert digest(spec) != before


def hashes_of(spec: ModelSpec) -> dict[str, str]:
    return {name: file_hash(spec.folder / name) for name in loaded_files(spec)}


def test_verify(tmp_path: Path) -> None:
    put(tmp_path, under("m", MINI))
    spec = only(scan(tmp_path))
    assert verify(spec) == []
    lines = [f'"{name}" = "{value}"' for name, value in hashes_of(spec).items()]
    put(tmp_path, {"m/model.toml": "\n".join(["[hashes]", *lines])})
    spec = only(scan(tmp_path))
    assert verify(spec) == []
    require_hashes(spec)
    put(tmp_path, {"m/2_Dense/model.safetensors": EMPTY.replace(b"  ", b"\n\n"), "m/added.json": "{}"})
    (tmp_path / "m/tokenizer.json").unlink()
    problems = verify(only(scan(tmp_path)))
    assert [problem.file for problem in problems] == ["2_Dense/model.safetensors", "added.json", "tokenizer.json"]
    assert problems[1] == Problem(file="added.json", message="is loaded, and no hash of it is recorded")
    with pytest.raises(ModelFolderError, match=r"2_Dense/model\.safetensors has the hash .*models verify --write"):
        require_hashes(only(scan(tmp_path)))


@pytest.mark.parametrize("name", ["model.toml", "config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_in_place_of_a_file_is_an_error(tmp_path: Path, name: str) -> None:
    put(tmp_path, under("m", PLAIN) | under("good", PLAIN))
    (tmp_path / "m" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "m" / name)
    found = scan(tmp_path)
    assert list(found.models) == ["good"]
    assert "m" in found.errors


@pytest.mark.parametrize("offsets", ["null", "[0]", "[0, null]", '"ab"', "{}", "3"])
def test_a_header_of_another_form_is_an_error(tmp_path: Path, offsets: str) -> None:
    header = f'{{"a": {{"data_offsets": {offsets}}}}}'.encode()
    put(tmp_path, under("m", PLAIN | {"model.safetensors": len(header).to_bytes(8, "little") + header}))
    assert "has no readable header" in scan(tmp_path).errors["m"]


def test_an_unreadable_file_is_not_reported_as_damaged(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"can't be read \(File name too long\)"):
        check_safetensors(tmp_path / ("x" * 300))


def test_hashes_on_a_full_disk_leave_model_toml_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.toml").write_text("instances = 2\n")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelFolderError, match="No space left"):
        write_hashes(tmp_path, {"model.onnx": "0" * 64})
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.toml"]
    assert (tmp_path / "model.toml").read_text() == "instances = 2\n"
