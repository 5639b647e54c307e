"""The files of models: links out of the repository, the files that are loaded, digests, and SHA256SUMS."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from multigpu_worker.repository.files import check_safetensors, digest, loaded_files, require_hashes
from multigpu_worker.repository.model import ModelFolderError
from multigpu_worker.repository.scan import read_model, scan

from tests.worker.repository.test_repository import EMPTY, MINI, hugging_face, only, put, under

PLAIN = hugging_face()
MODELS_PAGE = (Path(__file__).resolve().parents[3] / "docs" / "models.md").read_text("utf-8")


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


def test_files_are_loaded_as_sha256sum_recorded_them(tmp_path: Path) -> None:
    put(tmp_path, under("m", MINI))
    spec, folder = only(scan(tmp_path)), tmp_path / "m"
    require_hashes(spec)
    command = "find . -type f ! -name SHA256SUMS -exec sha256sum {} + > SHA256SUMS && sha256sum --quiet -c SHA256SUMS"
    assert command.partition(" && ")[0] in MODELS_PAGE
    subprocess.run(["sh", "-c", command], cwd=folder, check=True)
    require_hashes(spec)
    put(folder, {"added.json": "{}"})
    with pytest.raises(ModelFolderError, match=r"added.json has the SHA-256 \w{64}, and none is in SHA256SUMS"):
        require_hashes(only(scan(tmp_path)))
    (folder / "added.json").unlink()
    put(folder, {"2_Dense/model.safetensors": EMPTY.replace(b"  ", b"\n\n")})
    with pytest.raises(ModelFolderError, match=r"2_Dense/model\.safetensors has .* run `sha256sum` again"):
        require_hashes(only(scan(tmp_path)))
    put(folder, {"SHA256SUMS": "# a remark\n"})
    with pytest.raises(ModelFolderError, match="SHA256SUMS, line 1: write this file with `sha256sum`"):
        require_hashes(spec)


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
