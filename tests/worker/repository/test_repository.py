"""The model repository as files: what is a model, what its files say, and what is rejected."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from multigpu.config.config import WorkerConfig
from multigpu_worker.models.residency import ModelState
from multigpu_worker.models.routes import ModelRoutes
from multigpu_worker.repository.files import loaded_files
from multigpu_worker.repository.folders import find_models
from multigpu_worker.repository.model import BatchRules, Gate, ModelFolderError, ModelSpec, Scan
from multigpu_worker.repository.scan import scan

# A safetensors file without tensors: the length of its header, and the header.
EMPTY = b"\x08" + bytes(7) + b"{}      "


def put(root: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def hugging_face(architecture: str = "BertModel", **more: str) -> dict[str, str | bytes]:
    config = json.dumps({"model_type": "bert", "architectures": [architecture]})
    return {"config.json": config, "model.safetensors": EMPTY, **more}


def with_labels(labels: dict[str, Any], architecture: str = "BertForSequenceClassification") -> dict[str, str | bytes]:
    config = {"model_type": "bert", "architectures": [architecture], **labels}
    return hugging_face(**{"config.json": json.dumps(config)})


def under(folder: str, files: dict[str, str | bytes]) -> dict[str, str | bytes]:
    return {f"{folder}/{name}": content for name, content in files.items()}


MODULES = json.dumps([{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "2_Dense"}])
CROSS_ENCODER = json.dumps([{"type": "a.Transformer", "path": ""}])
MINI: dict[str, str | bytes] = {
    **hugging_face(),
    "tokenizer.json": "{}",
    "modules.json": MODULES,
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": EMPTY,
}


def only(found: Scan) -> ModelSpec:
    assert found.errors == {}
    (spec,) = found.models.values()
    return spec


@pytest.mark.parametrize(
    ("files", "source", "kind", "engine", "file"),
    [
        (MINI, "sentence-transformers", "embed", "auto", ""),
        (hugging_face(**{"tokenizer.json": "{}"}), "huggingface", "embed", "auto", ""),
        (hugging_face(), "huggingface", "infer", "auto", ""),
        (
            with_labels({"num_labels": 1}) | {"modules.json": CROSS_ENCODER},
            "sentence-transformers",
            "rerank",
            "auto",
            "",
        ),
        (hugging_face() | {"modules.json": CROSS_ENCODER}, "sentence-transformers", "embed", "auto", ""),
        (hugging_face("LlamaForCausalLM"), "huggingface", "generate", "auto", ""),
        (hugging_face("BertForSequenceClassification"), "huggingface", "classify", "auto", ""),
        (with_labels({"id2label": {"0": "LABEL_0"}}), "huggingface", "rerank", "auto", ""),
        (with_labels({"num_labels": 1}), "huggingface", "rerank", "auto", ""),
        (with_labels({"id2label": {"0": "no", "1": "yes"}}), "huggingface", "classify", "auto", ""),
        (with_labels({"id2label": {"0": "a"}}, "ViTForImageClassification"), "huggingface", "classify", "auto", ""),
        (
            with_labels({"num_labels": 1}) | {"model.toml": 'kind = "classify"'},
            "huggingface",
            "classify",
            "auto",
            "",
        ),
        (
            hugging_face("BertForSequenceClassification") | {"model.toml": 'kind = "rerank"'},
            "huggingface",
            "rerank",
            "auto",
            "",
        ),
        (hugging_face("ViTForImageClassification"), "huggingface", "classify", "auto", ""),
        ({"smol.Q4_1.gguf": "GGUF"}, "gguf", "generate", "auto", "smol.Q4_1.gguf"),
        ({"model.onnx": "x", "other.onnx": "y"}, "onnx", "infer", "auto", "model.onnx"),
        ({"net.onnx": "x", "weights.bin": "external data"}, "onnx", "infer", "auto", "net.onnx"),
        ({"config.json": "{}", "model.onnx": "x"}, "onnx", "infer", "auto", "model.onnx"),
        (
            {"net.pt2": "x", "model.toml": 'allow_pickle = ["net.pt2"]'},
            "torch-export",
            "infer",
            "auto",
            "net.pt2",
        ),
        ({"net.plan": "x"}, "tensorrt-plan", "infer", "auto", "net.plan"),
        (
            {"net.safetensors": EMPTY, "model.toml": '[parameters]\nclass = "nets:Net"'},
            "safetensors",
            "infer",
            "auto",
            "net.safetensors",
        ),
        (
            {"vision.py": "", "model.toml": 'engine = "vision:Engine"\nkind = "classify"'},
            "python",
            "classify",
            "vision:Engine",
            "",
        ),
        ({"model.toml": 'engine = "mine.vision:Engine"'}, "python", "infer", "mine.vision:Engine", ""),
    ],
)
def test_a_model_is_recognised_by_its_files(
    tmp_path: Path, files: dict[str, str | bytes], source: str, kind: str, engine: str, file: str
) -> None:
    put(tmp_path, under("m", files))
    spec = only(scan(tmp_path))
    assert (spec.id, spec.source, spec.kind, spec.engine, spec.file) == ("m", source, kind, engine, file)
    assert spec.folder == tmp_path / "m"


@pytest.mark.parametrize(
    ("file", "kind", "serves"),
    [("net.onnx", "embed", "infer"), ("net.pt2", "classify", "infer"), ("net.gguf", "embed", "generate")],
)
def test_a_kind_that_the_files_cannot_serve_is_an_error_of_the_scan(
    tmp_path: Path, file: str, kind: str, serves: str
) -> None:
    put(tmp_path, under("m", {file: "x", "model.toml": f'kind = "{kind}"'}))
    assert f"serves the kind {serves}, not {kind}" in scan(tmp_path).errors["m"]
    allowed = f'allow_pickle = ["{file}"]'
    put(tmp_path, under("m", {"model.toml": f'kind = "{kind}"\nengine = "mine:Engine"\n{allowed}'}))
    assert only(scan(tmp_path)).kind == kind


def test_every_key_of_a_model_toml(tmp_path: Path) -> None:
    text = """
    kind = "embed"
    source = "huggingface"
    engine = "onnx"
    precision = "int8"
    warm_up = false
    instances = 2
    concurrency = 8
    labels = { team = "search" }
    allow_pickle = ["pytorch_model.bin"]
    [batch]
    tasks_max = 64
    tokens_max = 4096
    delay_s = 0.005
    preferred = [8, 16]
    [gate]
    calibration = "calibration.jsonl"
    held_out = "held_out.jsonl"
    metric = "spearman"
    threshold = 0.5
    [parameters]
    int8_recipe = "default"
    layers = 3
    fast = true
    """
    put(tmp_path, under("m", hugging_face() | {"model.toml": text, "calibration.jsonl": "", "held_out.jsonl": ""}))
    spec = only(scan(tmp_path))
    wanted = ModelSpec(
        name="m",
        folder=tmp_path / "m",
        kind="embed",
        engine="onnx",
        source="huggingface",
        precision="int8",
        batch=BatchRules(tasks_max=64, tokens_max=4096, delay_s=0.005, preferred=(8, 16)),
        warm_up=False,
        instances=2,
        concurrency=8,
        labels={"team": "search"},
        parameters={"int8_recipe": "default", "layers": "3", "fast": "true"},
        gate=Gate(calibration="calibration.jsonl", held_out="held_out.jsonl", metric="spearman", threshold=0.5),
        allow_pickle=("pytorch_model.bin",),
        files_bytes=spec.files_bytes,
        changed_ns=spec.changed_ns,
    )
    assert spec == wanted
    assert ModelSpec.from_plain(spec.plain()) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("precison = 'fp16'", "unknown key: precison; did you mean precision?"),
        ("[batch]\ndelay = 1", "batch: unknown key: delay; did you mean delay_s?"),
        ("zzz = 1", "unknown key: zzz; known: kind, source"),
        ("engine = 'tensorflow'", "engine: 'tensorflow': none of auto, torch, onnx, tensorrt.*module:Class"),
        ("instances = 0", "instances: 0 is too small: at least 1"),
        ("versions = 'newest'", "versions: 'newest' is not"),
        ("versions = [0]", 'is not "latest", "all" or a list'),
        ("[batch]\npreferred = [8, 0]", "preferred: '8,0': a number of tasks is from 1 to 65536"),
        ("[gate]\ncalibration = 'gone.jsonl'", "gone.jsonl is missing: model.toml names it in .gate. calibration"),
        ("[gate]\ncalibration = '../secret'", "'../secret' is no path of a file in the model's folder"),
        ("file = '/etc/passwd'", "'/etc/passwd' is no path of a file"),
        ("source = 'onnx'\nfile = 'gone.onnx'", "gone.onnx is missing"),
        ("source = 'onnx'", "has no file in .onnx"),
        ("allow_pickle = 'all'", "is not a list of strings"),
        ("labels = { a = [1] }", r"labels: a = \[1\] is neither"),
        ("batch = 3", "batch: 3 is not a table"),
        ("kind = ", "is not TOML"),
        ("a = " + "[" * 3000, "is not TOML"),
    ],
)
def test_the_error_of_a_model_toml_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    put(tmp_path, under("bad", hugging_face() | {"model.toml": text}))
    put(tmp_path, under("good", hugging_face()))
    found = scan(tmp_path)
    assert list(found.models) == ["good"], "one broken model ends no scan"
    assert list(found.errors) == ["bad"]
    with pytest.raises(ModelFolderError, match=message):
        raise ModelFolderError(found.errors["bad"])
    assert str(tmp_path / "bad") in found.errors["bad"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": "{}"}, "has no weights: model.safetensors is missing"),
        ({"config.json": "{", "model.safetensors": EMPTY}, "can't be read as JSON"),
        ({"config.json": "{}", "model.safetensors": "version https://git-lfs"}, "is no safetensors file"),
        ({"config.json": "{}", "model.safetensors": EMPTY + b"x"}, "has 17 bytes and should have 16"),
        (
            {"config.json": "{}", "pytorch_model.bin": ""},
            "is a pickle.*safetensors.*allow_pickle.*pytorch_model.bin",
        ),
        ({"net.pth": "", "model.toml": "engine = 'a:B'"}, "is a pickle.*allow_pickle = ..net.pth"),
        ({"net.pt2": ""}, "is a program of torch.export, which can run any code.*allow_pickle = ..net.pt2"),
        (
            {"net.zip": "", "model.toml": "source = 'torch-export'\nfile = 'net.zip'"},
            "can run any code.*allow_pickle = ..net.zip",
        ),
        ({"a.gguf": "", "b.gguf": ""}, "has 2 such files: say in model.toml which"),
        ({"a.safetensors": EMPTY}, "does not say what it is: add its config.json"),
        ({"net.py": "", "model.toml": ""}, "name its class in model.toml: engine ="),
        (
            {"net.onnx": "", "model.toml": "engine = 'torch'"},
            "torch can't run onnx; auto, onnx, tensorrt can",
        ),
        ({"notes.md": ""}, "holds no model that is recognised"),
        ({"config.json": "{}", "model.safetensors.index.json": '{"weight_map": {"a": "../../x"}}'}, "is no path"),
        ({"config.json": "{}", "model.safetensors.index.json": "[]"}, "has no weight_map"),
        (
            {"config.json": "{}", "model.safetensors.index.json": '{"weight_map": {"a": "s-1.safetensors"}}'},
            "s-1.safetensors can't be read",
        ),
        (MINI | {"modules.json": '[{"path": "../.."}]'}, "is no path"),
        (MINI | {"modules.json": "[3]"}, "is no list of modules"),
    ],
)
def test_a_broken_folder_is_an_error_of_the_scan(tmp_path: Path, files: dict[str, str | bytes], message: str) -> None:
    put(tmp_path, under("bad", files))
    found = scan(tmp_path)
    assert found.models == {}
    with pytest.raises(ModelFolderError, match=message):
        raise ModelFolderError(found.errors["bad"])


@pytest.mark.parametrize("files", [hugging_face(), under("1", hugging_face()), under("other", hugging_face())])
def test_a_model_toml_that_is_a_dangling_link_is_an_error(tmp_path: Path, files: dict[str, str | bytes]) -> None:
    put(tmp_path, under("bad", files))
    (tmp_path / "bad/model.toml").symlink_to("../.settings/bad.toml")
    found = scan(tmp_path)
    assert found.models == {}, "it is not served with defaults"
    link = tmp_path / "bad/model.toml"
    assert found.errors == {
        "bad": f"{link} is a link to ../.settings/bad.toml, which is not there: remove or correct it"
    }
    put(tmp_path, {".settings/bad.toml": ""})
    assert "which is not there" not in str(scan(tmp_path).errors)


def test_a_pickle_that_is_allowed_by_name(tmp_path: Path) -> None:
    put(tmp_path, under("m", {"config.json": "{}", "pytorch_model.bin": "12345"}))
    put(tmp_path, {"m/model.toml": 'allow_pickle = ["pytorch_model.bin"]'})
    spec = only(scan(tmp_path))
    assert loaded_files(spec) == ["config.json", "pytorch_model.bin"]
    assert spec.files_bytes == 7


def test_names_and_namespaces(tmp_path: Path) -> None:
    put(tmp_path, under("sentence-transformers/all-MiniLM-L6-v2", MINI))
    put(tmp_path, under("a/b/c/d/e/too-deep", hugging_face()))
    put(tmp_path, under("one:two", hugging_face()))
    put(tmp_path, under(".copying", hugging_face()))
    put(tmp_path, {"README.md": "no folder"})
    (tmp_path / os.fsdecode(b"\xff\xfe")).mkdir()
    found = scan(tmp_path)
    assert list(found.models) == ["sentence-transformers/all-MiniLM-L6-v2"]
    assert set(found.errors) == {"a/b/c/d", r"one\x3atwo", r"\udcff\udcfe"}
    for text in (*found.errors, *found.errors.values()):
        text.encode()
    assert "can't be a model's name" in found.errors[r"one\x3atwo"]


@pytest.fixture
def reads_left(monkeypatch: pytest.MonkeyPatch) -> dict[Path, int]:
    """By folder: how often it can be read before a read fails, once. Not by chmod, which does not stop root."""
    left: dict[Path, int] = {}
    scandir = os.scandir

    def fails(path: Path) -> Any:
        if path in left:
            left[path] -= 1
            if left[path] == -1:
                raise OSError(5, "Input/output error", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fails)
    return left


READS = range(4)  # of a namespace in a scan


def test_models_stay_in_memory_while_their_namespace_cannot_be_read(
    tmp_path: Path, reads_left: dict[Path, int]
) -> None:
    acme = {"acme/x", "acme/deep/y"}
    for name in (*acme, "acme-2"):
        put(tmp_path, under(name, hugging_face()))
    config = WorkerConfig(model_repository=str(tmp_path))
    routes = ModelRoutes(find_models(config), "auto")
    for resident in routes.residents.values():
        resident.enter(ModelState.READY, 0.0)
    for folder, gone in (("acme", acme), ("acme/deep", {"acme/deep/y"})):
        for reads in READS:
            reads_left[tmp_path / folder] = reads
            found = find_models(config)
            assert not gone & set(found.models)
            assert "Input/output error" in found.errors[folder]
            routes.put(found)
            assert acme <= {name for _, name in routes.table} and not routes.replaced(), (folder, reads)
    reads_left[tmp_path] = 0
    with pytest.raises(ModelFolderError, match=r"model_repository: .* can't be read: Input/output error"):
        find_models(config)
    routes.put(find_models(config))
    assert not routes.replaced()
    for folder in ("acme/x", "acme/deep"):  # the empty namespace remains, and is no model
        shutil.rmtree(tmp_path / folder)
    routes.put(find_models(config))
    assert {resident.spec.name for resident in routes.replaced()} == acme


def versioned(root: Path, toml: str, *versions: int) -> None:
    put(root, {"m/model.toml": toml})
    for version in versions:
        put(root, under(f"m/{version}", hugging_face()))


@pytest.mark.parametrize(
    ("toml", "served", "current"),
    [
        ("", ["m:10"], "m:10"),
        ("versions = 'latest'", ["m:10"], "m:10"),
        ("versions = 'all'", ["m:1", "m:2", "m:10"], "m:10"),
        ("versions = [2, 1]", ["m:1", "m:2"], "m:2"),
    ],
)
def test_versions(tmp_path: Path, toml: str, served: list[str], current: str) -> None:
    versioned(tmp_path, toml, 1, 2, 10)
    found = scan(tmp_path)
    assert (list(found.models), found.current, found.errors) == (served, {"m": current}, {})
    spec = found.models[current]
    assert (spec.name, spec.version, spec.folder) == ("m", current[2:], tmp_path / "m" / current[2:])


def test_while_a_new_version_is_broken_the_one_before_is_served(tmp_path: Path) -> None:
    versioned(tmp_path, "", 1, 2)
    (tmp_path / "m/2/model.safetensors").unlink()
    found = scan(tmp_path)
    assert (list(found.models), found.current) == (["m:1"], {"m": "m:1"})
    assert "has no weights" in found.errors["m:2"]


def test_missing_versions_and_versions_with_a_model_toml_are_errors(tmp_path: Path) -> None:
    versioned(tmp_path, "versions = [1, 3]", 1)
    assert "asks for version 3; there are [1]" in scan(tmp_path).errors["m"]
    versioned(tmp_path, "", 1)
    put(tmp_path, {"m/1/model.toml": ""})
    assert "the one above is for all versions" in scan(tmp_path).errors["m:1"]


def test_a_root_that_is_no_repository(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="is no folder: create it"):
        scan(tmp_path / "gone")
    put(tmp_path, hugging_face())
    with pytest.raises(ModelFolderError, match="is a model itself"):
        scan(tmp_path)


def test_the_scan_reads_without_heavy_imports(tmp_path: Path) -> None:
    put(tmp_path, under("m", MINI))
    code = (
        "import sys; from pathlib import Path; from multigpu_worker.repository.scan import scan\n"
        f"assert list(scan(Path({str(tmp_path)!r})).models) == ['m']\n"
        "heavy = {'torch', 'numpy', 'grpc', 'google', 'click'} & set(sys.modules); assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr


def test_model_toml_examples_of_the_docs_are_valid() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/models.md").read_text("utf-8")
    blocks: list[dict[str, Any]] = []
    from multigpu_worker.repository.model_toml import parse

    for block in page.split("```toml\n")[1:]:
        text = block.split("```")[0]
        if "[worker]" not in text:
            tomllib.loads(text)
            blocks.append(parse(text.encode(), "docs"))
    assert len(blocks) >= 2
