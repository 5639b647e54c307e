"""The files of a model: which of them are loaded, and whether they are complete and have the recorded hashes.

Pickle can run any code when it is read, so weights in that format count as no weights, unless model.toml allows the
file by name. Files outside the repository, by a link or by a path with "..", are rejected.
"""

import hashlib
import json
import os
import re
import stat
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from multigpu_worker.repository.model import ModelFolderError, ModelSpec, check_inside
from multigpu_worker.repository.model_toml import FILE_NAME

PICKLE_SUFFIXES = (".bin", ".pt", ".pt2", ".pth", ".ckpt", ".pkl", ".pickle")
PICKLED_WEIGHTS = "pytorch_model"
# Further files that the libraries read: settings, tokenizers, templates.
SIDE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".jsonl")
# Sources in the layout of Hugging Face. Models of other sources may read any file in their folder, so all files count.
LAYOUT_SOURCES = ("sentence-transformers", "huggingface")
# The file with the hashes of all other files, in the format of `sha256sum`.
SUMS_NAME = "SHA256SUMS"
_SUM_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
READ_BYTES = 4 << 20
HASHES_MAX = 65_536
# A safetensors header holds names and shapes; even the largest models stay far below this. So do other JSON files.
SAFETENSORS_HEADER_BYTES_MAX = JSON_BYTES_MAX = 16 << 20
# Limit of a model's files together. No model is as large, but a sparse file may have such a size.
MODEL_FILES_BYTES_MAX = 1 << 50
# A file changed more recently may change again within the same tick of the file system's clock, and look the same.
SETTLED_NS = 2_000_000_000


def loaded_files(spec: ModelSpec) -> list[str]:
    """The files that loading the model reads, by their path in its folder, sorted. Raises ModelFolderError."""
    if spec.source == "gguf":
        return sorted({spec.file, *(e.name for e in _entries(spec.folder) if e.name.endswith(SIDE_SUFFIXES))})
    if spec.source not in LAYOUT_SOURCES:
        return sorted(_all_files(spec.folder))
    files: set[str] = set()
    for part in module_folders(spec.folder):
        weights = weight_files(spec.folder, part, spec.allow_pickle)
        side = (entry.name for entry in _entries(spec.folder / part) if entry.name.endswith(SIDE_SUFFIXES))
        files |= {f"{part}/{name}" if part else name for name in [*weights, *side]}
    return sorted(files - {FILE_NAME})


def module_folders(folder: Path) -> list[str]:
    """The folders of a sentence-transformers model's parts, by path in its folder; [""] for all others."""
    if not (folder / "modules.json").is_file():
        return [""]
    modules = read_json(folder / "modules.json")
    try:
        paths = [str(module["path"]) for module in modules]
        inside = {check_inside(path.rstrip("/")) for path in paths if path}
    except (TypeError, KeyError) as error:
        raise ModelFolderError(f"{folder / 'modules.json'} is no list of modules with a type and a path") from error
    except ValueError as error:
        raise ModelFolderError(f"{folder / 'modules.json'}: {error}") from error
    return ["", *sorted(path for path in inside if (folder / path).is_dir())]


def weight_files(folder: Path, part: str, allow_pickle: Iterable[str]) -> list[str]:
    """The weights in one folder of a Hugging Face layout: safetensors, whole or in shards, else a pickle if it may be
    loaded. Empty: there are none. Raises ModelFolderError.
    """
    at = folder / part
    if (at / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = at / "model.safetensors.index.json"
    if index.is_file():
        return _shards(index)
    pickles = sorted(e.name for e in _entries(at) if e.name.startswith(PICKLED_WEIGHTS) and e.name.endswith(".bin"))
    rejected = [name for name in pickles if (f"{part}/{name}" if part else name) not in set(allow_pickle)]
    if rejected:
        raise ModelFolderError(pickle_rejection(at / rejected[0], f"{part}/{rejected[0]}" if part else rejected[0]))
    return pickles


def pickle_rejection(path: Path, name: str) -> str:
    """Why a file that can run code is not loaded, and what to do."""
    what, convert = "pickle", "convert it to safetensors (AutoModel.from_pretrained(f).save_pretrained(f))"
    if name.endswith(".pt2"):
        what, convert = "program of torch.export", "export it as ONNX"
    return (
        f"{path} is a {what}, which can run any code, and is not loaded. Where you trust it, {convert}, "
        f'or name it in {FILE_NAME}: allow_pickle = ["{name}"]'
    )


def check_files(spec: ModelSpec) -> tuple[int, int]:
    """Check that the loaded files exist, are complete, and are no pickles that weren't allowed.

    Returns their bytes, and when the newest one was changed, in nanoseconds since 1970. Raises ModelFolderError.
    """
    size_bytes = changed_ns = 0
    for name in loaded_files(spec):
        path = spec.folder / name
        # In the layouts of Hugging Face `weight_files` has already rejected pickles.
        pickled = spec.source not in LAYOUT_SOURCES and (
            name.endswith(PICKLE_SUFFIXES) or (spec.source == "torch-export" and name == spec.file)
        )
        if pickled and spec.source != "onnx" and name not in spec.allow_pickle:
            raise ModelFolderError(pickle_rejection(path, name))
        try:
            status = path.stat()
        except OSError as error:
            raise ModelFolderError(f"{path} can't be read ({error.strerror}): copy the complete folder") from error
        if not stat.S_ISREG(status.st_mode):
            raise ModelFolderError(f"{path} is no file: copy the complete model folder")
        if not status.st_size and name == spec.file:
            raise ModelFolderError(f"{path} is empty: copy it again")
        # transformers opens the paths in this field, wherever they lead.
        if path.name == "tokenizer_config.json" and "/" in str(read_json(path).get("fast_tokenizer_files")):
            raise ModelFolderError(f"{path} has a path in fast_tokenizer_files: leave it out")
        size_bytes += status.st_size
        changed_ns = max(changed_ns, status.st_mtime_ns)
        if name.endswith(".safetensors"):
            check_safetensors(path)
    if size_bytes > MODEL_FILES_BYTES_MAX:
        raise ModelFolderError(f"{spec.folder} has files of {size_bytes} bytes: copy it again")
    return size_bytes, changed_ns


def check_safetensors(path: Path) -> None:
    """Compare the file's size with its header, to find truncated copies and Git LFS pointers. Raises ModelFolderError.

    The format: https://github.com/huggingface/safetensors#format
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < header_bytes <= min(size, SAFETENSORS_HEADER_BYTES_MAX):
                raise ModelFolderError(f"{path} is no safetensors file ({size} bytes): copy it again")
            header = json.loads(file.read(header_bytes))
        end = max((int(t["data_offsets"][1]) for name, t in header.items() if name != "__metadata__"), default=0)
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is missing: copy the complete model folder") from None
    except OSError as error:
        raise ModelFolderError(f"{path} can't be read ({error.strerror})") from error
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise ModelFolderError(f"{path} has no readable header ({error}): copy it again") from error
    if size != 8 + header_bytes + end:
        raise ModelFolderError(f"{path} has {size} bytes and should have {8 + header_bytes + end}: copy it again")


def reject_links(folder: Path, root: Path) -> None:
    """Raises ModelFolderError if a link anywhere in a model's folder leads out of the repository, or to a folder, which
    could contain further links. Every file is checked, since libraries read more files than `loaded_files` knows.
    """
    reject_outside(folder, root)
    for at, folders, files in os.walk(folder):
        for path in (Path(at, name) for name in (*folders, *files)):
            if path.is_symlink():
                reject_outside(path, root)
                if path.is_dir():
                    raise ModelFolderError(f"{path} is a link to a folder: copy the files there instead")


def reject_outside(path: Path, root: Path) -> None:
    """Raises ModelFolderError if the path leads out of the repository."""
    real, inside = os.path.realpath(path), os.path.realpath(root)
    if real != inside and not real.startswith(inside.rstrip("/") + "/"):
        raise ModelFolderError(
            f"{path} is a link out of the repository, to {real}: copy what it links to there, or serve that folder by "
            "name with `models`"
        )


def digest(spec: ModelSpec) -> str:
    """SHA-256, in hex, over the names and hashes of the files that are loaded. Raises ModelFolderError."""
    lines = [f"{file_hash(spec.folder / name)}  {name}\n" for name in loaded_files(spec)]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def require_hashes(spec: ModelSpec) -> None:
    """Raises ModelFolderError if the folder has SHA256SUMS and a loaded file's hash is missing there or differs. Call
    it just before loading.
    """
    path = spec.folder / SUMS_NAME
    try:
        lines = _small_file(path).decode().removesuffix("\n").split("\n")
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"{path} can't be read: {error}") from error
    recorded: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if (match := _SUM_LINE.fullmatch(line)) is None:
            raise ModelFolderError(f"{path}, line {number}: write this file with `sha256sum`")
        recorded[match[2].removeprefix("./")] = match[1].lower()
    for name in loaded_files(spec):
        wanted, found = recorded.get(name, "none"), file_hash(spec.folder / name)
        if found != wanted:
            raise ModelFolderError(
                f"{spec.folder / name} has the SHA-256 {found}, and {wanted} is in {SUMS_NAME}: copy the model again, "
                "or, if the change was meant, run `sha256sum` again"
            )


# Hashes by path, size, time of change and inode, so that an unchanged file isn't read again.
_hashes: OrderedDict[tuple[str, int, int, int], str] = OrderedDict()


def file_hash(path: Path) -> str:
    """A file's SHA-256 in hex. Raises ModelFolderError."""
    hasher = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            key = (str(path), status.st_size, status.st_mtime_ns, status.st_ino)
            if key in _hashes:
                return _hashes[key]
            while piece := file.read(READ_BYTES):
                hasher.update(piece)
    except OSError as error:
        raise ModelFolderError(f"{path} can't be read: {error.strerror}") from error
    if time.time_ns() - status.st_mtime_ns > SETTLED_NS:
        _hashes[key] = hasher.hexdigest()
    while len(_hashes) > HASHES_MAX:
        _hashes.popitem(last=False)
    return hasher.hexdigest()


def read_json(path: Path) -> Any:
    """Content of a JSON file of a model. Raises ModelFolderError if it can't be read or parsed."""
    try:
        return json.loads(_small_file(path))
    except FileNotFoundError:
        raise ModelFolderError(f"{path} is missing: copy the complete model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} can't be read as JSON ({error}): copy the model folder again") from error


def _small_file(path: Path) -> bytes:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > JSON_BYTES_MAX:
        raise ModelFolderError(f"{path} is no file of at most {JSON_BYTES_MAX >> 20} MiB: copy it again")
    return path.read_bytes()


def _shards(index: Path) -> list[str]:
    listing = read_json(index)
    weight_map = listing.get("weight_map") if isinstance(listing, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFolderError(f"{index} has no weight_map: copy the model folder again")
    try:
        return sorted({check_inside(str(name)) for name in weight_map.values()})
    except ValueError as error:
        raise ModelFolderError(f"{index}: {error}") from error


def _all_files(folder: Path, under: str = "") -> Iterator[str]:
    for entry in _entries(folder / under):
        if entry.name not in (FILE_NAME, SUMS_NAME):
            yield under + entry.name
    with os.scandir(folder / under) as entries:
        folders = [entry for entry in entries if entry.is_dir() and _is_visible(entry.name)]
    for entry in folders:
        if entry.is_symlink():
            raise ModelFolderError(f"{entry.path} is a link to a folder: copy the files there instead")
        yield from _all_files(folder, f"{under}{entry.name}/")


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    """The files in a folder, without hidden ones. Links to files are among them."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if _is_visible(entry.name) and not entry.is_dir()]
    except OSError as error:
        raise ModelFolderError(f"{folder} can't be read: {error.strerror}") from error


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"
