"""A model's tensors, and the memory of its weights and cache, from the headers of its files without a model library.

The formats: https://github.com/huggingface/safetensors#format,
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import functools
import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigpu_worker.repository.files import (
    LAYOUT_SOURCES,
    SAFETENSORS_HEADER_BYTES_MAX,
    module_folders,
    read_json,
    weight_files,
)
from multigpu_worker.repository.model import ModelFolderError, ModelSpec

# Safetensors types that are converted to the precision the model is served at. Others are kept.
_FLOATING = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
# GGUF value types: those of a fixed size, with their struct formats, and the two others.
_GGUF_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_GGUF_VERSIONS = (2, 3)
_GGUF_DIMENSIONS_MAX = 8
# A GGUF header has the vocabulary: at most 300,000 tokens and 600,000 merges in the models of 2026.
_GGUF_HEADER_BYTES_MAX, _GGUF_VALUES_MAX = 64 << 20, 4_000_000
# Exceptions that a damaged, truncated or absurd header may cause.
UNREADABLE = (
    ModelFolderError,
    OSError,
    ValueError,
    ArithmeticError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    struct.error,
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. `numbers`: how many numbers are converted to the precision in use; 0: none, it is kept."""

    name: str
    numbers: int
    stored_bytes: int

    def bytes_at(self, number_bytes: int) -> int:
        return self.numbers * number_bytes or self.stored_bytes


def read_tensors(spec: ModelSpec) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a GGUF file or of safetensors files, each with the folder of its part ("" for the whole model). A
    pickle counts as one tensor without a name. Raises one of UNREADABLE; ValueError for other formats.
    """
    if spec.source == "gguf":
        yield from (("", tensor) for tensor in _read_gguf(spec.folder / spec.file, spec.changed_ns)[0])
        return
    if spec.source not in LAYOUT_SOURCES:
        raise ValueError(f"tensors of {spec.source} files are not listed")
    for part in module_folders(spec.folder):
        for name in weight_files(spec.folder, part, spec.allow_pickle):
            path = spec.folder / part / name
            if path.suffix == ".safetensors":
                yield from ((part, tensor) for tensor in _read_safetensors(path))
            else:
                yield part, StoredTensor("", 0, path.stat().st_size)


def weights_bytes(spec: ModelSpec, number_bytes: int) -> int:
    """Memory of the weights at `number_bytes` per number; for other formats and unreadable files their size on disk."""
    try:
        return sum(tensor.bytes_at(number_bytes) for _, tensor in read_tensors(spec))
    except UNREADABLE:
        return spec.files_bytes


def context_bytes(spec: ModelSpec, number_bytes: int) -> int:
    """Memory of a language model's keys and values for the longest sequence. 0: unknown."""
    try:
        if spec.source == "gguf":
            _, facts = _read_gguf(spec.folder / spec.file, spec.changed_ns)
            of = f"{facts['general.architecture']}."
            layers, context = int(facts[of + "block_count"]), int(facts[of + "context_length"])
            all_heads = int(facts[of + "attention.head_count"])
            heads = int(facts.get(of + "attention.head_count_kv", all_heads))
            head_size = int(facts.get(of + "attention.key_length", facts[of + "embedding_length"] // all_heads))
        else:
            config = read_json(spec.folder / "config.json")
            config = config.get("text_config") or config
            layers, context = int(config["num_hidden_layers"]), int(config["max_position_embeddings"])
            all_heads = int(config["num_attention_heads"])
            heads = int(config.get("num_key_value_heads") or all_heads)
            head_size = int(config.get("head_dim") or config["hidden_size"] // all_heads)
    except UNREADABLE:
        return 0
    if "context" in spec.parameters and spec.parameters["context"].isdecimal():
        context = min(context, int(spec.parameters["context"]))
    return max(0, 2 * layers * heads * head_size * context * number_bytes)


def _read_safetensors(path: Path) -> Iterator[StoredTensor]:
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > SAFETENSORS_HEADER_BYTES_MAX:
            raise ValueError(f"{path} has no sane header")
        header: dict[str, Any] = json.loads(file.read(header_bytes))
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = map(int, tensor["data_offsets"])
        numbers = math.prod(map(int, tensor["shape"])) if tensor["dtype"] in _FLOATING else 0
        if not 0 <= numbers <= end - begin <= path.stat().st_size:
            raise ValueError(f"{path} is too small for the tensor {name[:100]}")
        yield StoredTensor(name, numbers, end - begin)


@functools.lru_cache(maxsize=8)  # skipping the vocabulary takes long
def _read_gguf(path: Path, _changed_ns: int) -> tuple[tuple[StoredTensor, ...], Mapping[str, Any]]:
    """The tensors, which are all dequantised, and the metadata; lists are given as their length."""
    size_bytes = path.stat().st_size
    header_bytes = min(size_bytes, _GGUF_HEADER_BYTES_MAX)
    with path.open("rb") as file, mmap.mmap(file.fileno(), header_bytes, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        magic, version, tensors, facts_count = reader.take("4sIQQ")
        if magic != b"GGUF" or version not in _GGUF_VERSIONS:
            raise ValueError(f"{path} is no GGUF file of version {_GGUF_VERSIONS}")
        facts = {reader.string(): reader.value(*reader.take("I")) for _ in range(facts_count)}
        found = []
        for _ in range(tensors):
            name = reader.string()
            (dimensions,) = reader.take("I")
            if dimensions > _GGUF_DIMENSIONS_MAX:
                raise ValueError(f"{path} has a tensor of {dimensions} dimensions")
            found.append(StoredTensor(name, math.prod(reader.take(f"{dimensions}Q")), 0))
            reader.take("IQ")  # type and offset
        if sum(tensor.numbers for tensor in found) > 8 * size_bytes:  # less than a bit for each
            raise ValueError(f"{path} is too small for its tensors")
        return tuple(found), facts


class _Reader:
    """Reads consecutive little-endian values. Raises struct.error at the end of the data, ValueError at too many."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = self._taken = 0

    def take(self, form: str) -> tuple[Any, ...]:
        self._taken += 1
        if self._taken > _GGUF_VALUES_MAX:
            raise ValueError(f"more than {_GGUF_VALUES_MAX} values")
        values = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return values

    def string(self) -> str:
        (length,) = self.take("Q")
        (text,) = self.take(f"{self._within(length)}s")
        return bytes(text).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _GGUF_STRING:
            return self.string()
        if kind != _GGUF_ARRAY:
            return self.take(_GGUF_FIXED[kind])[0]
        element, count = self.take("IQ")
        if element == _GGUF_STRING:
            for _ in range(self._within(count)):
                (length,) = self.take("Q")
                self._at += self._within(length)
        else:
            self._at += struct.calcsize(_GGUF_FIXED[element]) * self._within(count)
        return count

    def _within(self, count: int) -> int:
        """The count. Raises ValueError if it exceeds the file's size, as in a damaged file."""
        if count > len(self._data):
            raise ValueError(f"{count} values in a file of {len(self._data)} bytes")
        return count
