"""Scans a model repository: which folders are models, which versions are served, and their specs.

A folder is a model if it has a model.toml, files that are recognised, or folders named 1, 2, … for its versions. Any
other folder is a namespace: the name of a model in it has both parts ("acme/reranker"). Hidden folders are skipped, so
a model that is copied to ".new" and then renamed appears all at once.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from multigpu._transport.names import UNPRINTABLE, escaped

from multigpu_worker.repository.files import (
    LAYOUT_SOURCES,
    check_files,
    module_folders,
    read_json,
    reject_links,
    reject_outside,
    weight_files,
)
from multigpu_worker.repository.model import (
    DIVIDED_KINDS,
    DIVIDED_SOURCES,
    REMOTE,
    STRATEGIES,
    VLLM,
    ModelFolderError,
    ModelSpec,
    Scan,
)
from multigpu_worker.repository.model_toml import FILE_NAME, read_toml

VERSION = re.compile(r"[1-9][0-9]{0,17}")
# The settings file of a LoRA adapter, as PEFT saves it.
ADAPTER_FILE = "adapter_config.json"
# Models are searched for down to this depth below the repository.
DEPTH_MAX = 4
NAME_BYTES_MAX = 200
ERROR_CHARS_MAX = 500
# Sources that are a single file: its suffixes, and the engines that can run it.
SINGLE_FILES = {
    "gguf": ((".gguf",), ("auto", "torch")),
    "onnx": ((".onnx",), ("auto", "onnx", "tensorrt")),
    "torch-export": ((".pt2",), ("auto", "torch")),
    "tensorrt-plan": ((".plan", ".engine"), ("auto", "tensorrt")),
    "safetensors": ((".safetensors",), ("auto", "torch")),
}
KIND_OF_SINGLE = {"gguf": "generate"}
TEXT_CLASSIFIER = "ForSequenceClassification"
KIND_OF_ARCHITECTURE = {
    "ForCausalLM": "generate",
    TEXT_CLASSIFIER: "classify",
    "ForImageClassification": "classify",
}
# A tokenizer can be built from any one of these.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)


# A function that raises ModelFolderError for a version that the caller can't serve.
SpecCheck = Callable[[ModelSpec], None]


def scan(root: Path, check: SpecCheck = lambda _spec: None) -> Scan:
    """The models of a repository. Raises ModelFolderError if there is no such folder, or if it is a model itself."""
    if not root.is_dir():
        raise ModelFolderError(f"model_repository: {root} is no folder: create it, or correct the path")
    models: dict[str, ModelSpec] = {}
    errors: dict[str, str] = {}
    current: dict[str, str] = {}
    unreadable: set[str] = set()
    for name, folder in model_folders(root, "", errors, unreadable):
        try:
            specs, broken = read_model(folder, name, root, check=check)
        except ModelFolderError as error:
            errors[name] = str(error)
            continue
        errors |= broken
        for spec in specs:
            models[spec.id] = spec
            # Versions come oldest first, so the latest one stays.
            current[name] = spec.id
    # If the root also contains other models, it is a repository to which somebody has added a model's files.
    if all(VERSION.fullmatch(name.partition("/")[0]) for name in current) and is_model(root):
        raise ModelFolderError(f"model_repository: {root} is a model itself: name the folder that it is in")
    errors = {_error_name(name): escaped(text)[:ERROR_CHARS_MAX] for name, text in errors.items()}
    return Scan(models=models, errors=errors, current=current, unreadable=frozenset(unreadable))


def is_model(folder: Path) -> bool:
    """Whether a folder is a model, complete or broken, and not a namespace. Raises ModelFolderError."""
    names = _names(folder)
    has_toml = FILE_NAME in names or (folder / FILE_NAME).is_symlink()  # read_toml reports a dangling link
    return has_toml or _recognised(names) is not None or bool(_versions_in(folder))


def read_model(
    folder: Path, name: str, root: Path | None, *, check: SpecCheck = lambda _spec: None
) -> tuple[list[ModelSpec], dict[str, str]]:
    """A model's versions that are to be served, oldest first; and by id, the errors of versions that can't be served.

    "latest" is the latest version that can be read: while a new version is broken, the one before it is served. If
    `root` is None, links may lead anywhere. Raises ModelFolderError if the model as a whole can't be served.
    """
    folder = folder.absolute()
    _check_name(name)
    with _as_folder_error(folder):
        if root is not None:
            reject_outside(folder / FILE_NAME, root)
        values = read_toml(folder)
    wanted = values.pop("versions", "latest")
    there = _versions_in(folder)
    if not there:
        with _as_folder_error(folder):
            spec = _read_version(folder, name, "", values, root)
            check(spec)
        return [spec], {}
    if isinstance(wanted, tuple) and (missing := sorted(set(wanted) - set(there))):
        raise ModelFolderError(f"{folder / FILE_NAME} asks for version {missing[0]}; there are {there}")
    specs: list[ModelSpec] = []
    errors: dict[str, str] = {}
    for version in sorted(wanted if isinstance(wanted, tuple) else there, reverse=True):
        try:
            with _as_folder_error(folder / str(version)):
                spec = _read_version(folder / str(version), name, str(version), values, root)
                check(spec)
            specs.insert(0, spec)
        except ModelFolderError as error:
            errors[f"{name}:{version}"] = str(error)
        if specs and wanted == "latest":
            break
    return specs, errors


def model_folders(
    parent: Path, prefix: str, errors: dict[str, str], unreadable: set[str], depth: int = 1
) -> Iterator[tuple[str, Path]]:
    """Name and folder of each model under a folder. Adds an error for each folder that can't be read or is no model.

    Adds the names of those that can't be read to `unreadable`. Raises ModelFolderError if the repository itself can't.
    """
    try:
        entries = sorted((e for e in os.scandir(parent) if not e.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        if not prefix:
            raise ModelFolderError(f"model_repository: {parent} can't be read: {error.strerror}") from error
        errors[prefix.rstrip("/")] = f"{parent} can't be read: {error.strerror}"
        unreadable.add(prefix.rstrip("/"))
        return
    for entry in entries:
        name, path = prefix + entry.name, Path(entry.path)
        try:
            dangling = entry.is_symlink() and not path.exists()
            if not (entry.is_dir() or dangling) or entry.name == "lost+found":
                continue
            _check_name(name)
            if dangling:
                errors[name] = f"{path} is a link to {path.readlink()}, which is not there: is a disk not mounted?"
            elif is_model(path):
                yield name, path
            elif not entry.is_symlink() and depth < DEPTH_MAX and any(e.is_dir() for e in os.scandir(path)):
                yield from model_folders(path, name + "/", errors, unreadable, depth + 1)
            else:
                errors[name] = f"{path} holds no model that is recognised: complete it, or write a {FILE_NAME} there"
        except (ModelFolderError, OSError) as error:
            errors[name] = str(error)
            unreadable.add(name)


@contextlib.contextmanager
def _as_folder_error(folder: Path) -> Iterator[None]:
    """Raise any error as ModelFolderError: the content of one folder must not end the scan of the others."""
    try:
        yield
    except ModelFolderError:
        raise
    except Exception as error:
        raise ModelFolderError(f"{folder} can't be read ({type(error).__name__}: {error}): copy it again") from error


def _read_version(folder: Path, name: str, version: str, values: dict[str, Any], root: Path | None) -> ModelSpec:
    if version and (folder / FILE_NAME).exists():
        raise ModelFolderError(f"{folder / FILE_NAME} does not belong there: the one above is for all versions")
    if root is not None:
        reject_links(folder, root)
    if values.get("engine") == REMOTE or "remote" in values:
        _check_remote(folder, values)
        source, file = REMOTE, ""
    else:
        source, file = _source(folder, values)
    engines = SINGLE_FILES[source][1] if source in SINGLE_FILES else None
    engine = values.get("engine", "auto")
    if engines is not None and engine not in engines and ":" not in engine:
        raise ModelFolderError(f"{folder}: the engine {engine} can't run {source}; {', '.join(engines)} can")
    if source == "python" and ":" not in engine:
        raise ModelFolderError(f'{folder} has custom code: name its class in {FILE_NAME}: engine = "module:Class"')
    if source == "safetensors" and ":" not in engine and "class" not in values.get("parameters", {}):
        raise ModelFolderError(
            f"{folder / file} does not say what it is: add its config.json, or name the class of the module in "
            f'{FILE_NAME}: [parameters] class = "module:Class"'
        )
    kind = values.get("kind") or _kind(folder, source)
    if source in SINGLE_FILES and ":" not in engine and kind != (only := KIND_OF_SINGLE.get(source, "infer")):
        raise ModelFolderError(
            f'{folder}: {source} serves the kind {only}, not {kind}: say kind = "{only}" in {FILE_NAME} or leave it '
            'out, or name an engine of your own: engine = "module:Class"'
        )
    if engine == VLLM and (source, kind) != ("huggingface", "generate"):
        raise ModelFolderError(
            f"{folder}: the engine {VLLM} runs Hugging Face folders of kind generate, not {source} of {kind}"
        )
    values = _check_divided(folder, values, source, kind)
    _check_adapters(folder, values)
    read = {"source": source, "file": file, "kind": kind}
    spec = ModelSpec(name=name, folder=folder, version=version, **(values | read))
    size_bytes, changed_ns = check_files(spec)
    for key in ("calibration", "held_out"):
        data = getattr(spec.gate, key)
        if data and not (folder / data).is_file():
            raise ModelFolderError(f"{folder / data} is missing: {FILE_NAME} names it in [gate] {key}")
    return dataclasses.replace(spec, files_bytes=size_bytes, changed_ns=changed_ns)


def _check_divided(folder: Path, values: dict[str, Any], source: str, kind: str) -> dict[str, Any]:
    """Check the values that divide a model. Returns all values, with the engine torch if there is a device_map."""
    engine = values.get("engine", "auto")
    if values.get("device_map"):
        if kind not in DIVIDED_KINDS or source not in DIVIDED_SOURCES or engine not in ("auto", "torch"):
            raise ModelFolderError(
                f"{folder / FILE_NAME}: device_map is for Hugging Face, sentence-transformers and GGUF models on the "
                "engine torch"
            )
        if values["device_map"] not in STRATEGIES and not (folder / values["device_map"]).is_file():
            raise ModelFolderError(f"{folder / values['device_map']} is missing, which {FILE_NAME} names as device_map")
        values = values | {"engine": "torch"}
    if values.get("tensor_parallel", 1) * values.get("pipeline", 1) > 1:
        if kind != "generate" or engine not in ("auto", "torch", VLLM):
            raise ModelFolderError(
                f"{folder / FILE_NAME}: tensor_parallel and pipeline are for kind generate on the engine torch or vllm"
            )
        if values.get("device_map"):
            raise ModelFolderError(f"{folder / FILE_NAME}: tensor_parallel and pipeline take no device_map")
    for key in ("max_memory", "devices"):
        if values.get(key) and not values.get("device_map"):
            raise ModelFolderError(f'{folder / FILE_NAME}: {key} is for a device_map: set device_map = "auto"')
    return values


def _check_adapters(folder: Path, values: dict[str, Any]) -> None:
    """Raises ModelFolderError."""
    if values.get("adapters") and values.get("engine") != VLLM:
        raise ModelFolderError(f'{folder / FILE_NAME}: adapters are for engine = "{VLLM}"')
    for name_of_adapter, where in values.get("adapters", {}).items():
        if not (folder / where / ADAPTER_FILE).is_file():
            raise ModelFolderError(f"{folder / where / ADAPTER_FILE} is missing: adapters: {name_of_adapter}")


def _check_remote(folder: Path, values: dict[str, Any]) -> None:
    """Raises ModelFolderError."""
    if values.get("engine") != REMOTE or "remote" not in values or not values["remote"].url or "kind" not in values:
        raise ModelFolderError(
            f'{folder / FILE_NAME}: a model on another server has engine = "{REMOTE}", its kind, and [remote] with the '
            "server's url"
        )
    if values["kind"] == "classify":
        raise ModelFolderError(f"{folder / FILE_NAME}: the engine {REMOTE} runs embed, generate, infer and rerank")


def _source(folder: Path, values: dict[str, Any]) -> tuple[str, str]:
    """The source in the folder, and the file's name if the source is a single file."""
    source, file = values.get("source", ""), values.get("file", "")
    names = _names(folder)
    if not source:
        source = _recognised([file]) if file else _recognised(names)
        if source == "huggingface" and not weight_files(folder, "", values.get("allow_pickle", ())):
            # The folder may contain an export, and the config.json of the model from which it was made.
            source = _recognised([name for name in names if name != "config.json"]) or source
        if source is None and (":" in values.get("engine", "") or any(name.endswith(".py") for name in names)):
            source = "python"
        if source is None:
            raise ModelFolderError(
                f"{folder} holds no model that is recognised: complete it, or say `source` and `file`"
            )
    if source in LAYOUT_SOURCES:
        pickles = values.get("allow_pickle", ())
        if not any(weight_files(folder, part, pickles) for part in module_folders(folder)):
            raise ModelFolderError(f"{folder} has no weights: model.safetensors is missing")
    if source in SINGLE_FILES:
        file = file or _only(folder, names, source)
        if not (folder / file).is_file():
            raise ModelFolderError(f"{folder / file} is missing: copy it there, or correct `file` in {FILE_NAME}")
    return source, file


def _recognised(names: list[str]) -> str | None:
    if "modules.json" in names:
        return "sentence-transformers"
    if "config.json" in names:
        return "huggingface"
    return next(
        (source for source, (suffixes, _) in SINGLE_FILES.items() if any(n.endswith(suffixes) for n in names)), None
    )


def _only(folder: Path, names: list[str], source: str) -> str:
    """The file of a source in a folder; of several, model.* if it exists."""
    suffixes = SINGLE_FILES[source][0]
    found = [name for name in names if name.endswith(suffixes)]
    named = [name for name in found if name in {f"model{suffix}" for suffix in suffixes}]
    for chosen in (named, found):
        if len(chosen) == 1:
            return chosen[0]
    if not found:
        raise ModelFolderError(f"{folder} has no file in {' or '.join(suffixes)}: copy it there")
    raise ModelFolderError(f'{folder} has {len(found)} such files: say in {FILE_NAME} which: file = "{found[0]}"')


def _kind(folder: Path, source: str) -> str:
    if source == "sentence-transformers":
        # sentence-transformers saves a cross-encoder as a single module in the model's folder.
        whole = (folder / "config.json").is_file()
        return "rerank" if whole and _kind_of_config(folder) == "rerank" else "embed"
    if source != "huggingface":
        return KIND_OF_SINGLE.get(source, "infer")
    if kind := _kind_of_config(folder):
        return kind
    return "embed" if any((folder / name).is_file() for name in TOKENIZER_FILES) else "infer"


def _kind_of_config(folder: Path) -> str:
    """The kind for the architecture in a config.json. Empty: the architecture is not in KIND_OF_ARCHITECTURE."""
    config = read_json(folder / "config.json")
    architectures = config.get("architectures") if isinstance(config, dict) else None
    for architecture in architectures if isinstance(architectures, list) else ():
        for ending, kind in KIND_OF_ARCHITECTURE.items():
            if str(architecture).endswith(ending):
                return "rerank" if ending == TEXT_CLASSIFIER and _has_one_label(config) else kind
    return ""


def _has_one_label(config: dict[str, Any]) -> bool:
    names = config.get("id2label")
    return len(names) == 1 if isinstance(names, dict) else config.get("num_labels") == 1


def _versions_in(folder: Path) -> list[int]:
    return sorted(int(name) for name in _names(folder, folders=True) if VERSION.fullmatch(name))


def _names(folder: Path, *, folders: bool = False) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if (e.is_dir() if folders else e.is_file()) and e.name[0] != ".")
    except OSError as error:
        raise ModelFolderError(f"{folder} can't be read: {error.strerror}") from error


def _check_name(name: str) -> None:
    """Raises ModelFolderError if tasks can't ask for the name, or if it may be taken for a version, list or option."""
    if UNPRINTABLE.search(name) or re.search(r"[:=,\s\\]", name) or name.startswith("-"):
        raise ModelFolderError(
            f"'{escaped(name)}' can't be a model's name: only printable characters, no spaces, colons, commas, "
            "backslashes or = in it, and no - in front"
        )
    if len(name.encode()) > NAME_BYTES_MAX:
        raise ModelFolderError(f"{name!r} is too long for a model's name: {NAME_BYTES_MAX} bytes at most")


def _error_name(name: str) -> str:
    """A name under which an error can be reported, whatever the folder is called. Keeps ":version" of a valid name."""
    base, colon, version = name.rpartition(":")
    if colon and base and ":" not in base and VERSION.fullmatch(version):
        return f"{_error_name(base)}:{version}"
    text = escaped(name).replace(":", "\\x3a").encode()[:NAME_BYTES_MAX]
    return text.decode(errors="ignore") or "."
