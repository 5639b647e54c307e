"""The parts of a transformers model, in the order in which they run, with the bytes of each from the files' headers.

A part is a module that is never divided between devices: a layer (the model's class says which modules those are), or
what is beside the layers, as the embeddings. The model is made on torch's device "meta", which has no memory, from its
config.json or the GGUF file's metadata.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from multigpu_worker.engines.common.pretrained import LOCAL, transformers
from multigpu_worker.engines.planning.costs import heads_of
from multigpu_worker.engines.planning.wish import gib
from multigpu_worker.repository.files import read_json
from multigpu_worker.repository.model import ModelFolderError, ModelSpec
from multigpu_worker.repository.weight_files import UNREADABLE, StoredTensor, read_tensors

# How a rule of a tensor-parallel plan divides a weight; rules with other names leave it whole.
_DIVIDING = ("colwise", "rowwise")
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.")
_LAYER = re.compile(r"\.(\d+)$")


@dataclass(slots=True, kw_only=True)
class Part:
    """`name`: of its module. `numbers`: by the configuration. `divided`: the share of them that tensor parallelism
    divides. `tied`: the part whose weights it uses; "": it has its own.
    """

    name: str
    layer: bool
    numbers: int
    tied: str = ""
    divided: float = 0.0
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A model's parts in order, and its text model's configuration."""

    architecture: str
    parts: list[Part]
    config: Any
    tensor_plan: Mapping[str, str]
    unused: str  # weights in the files that no module has; "": none

    @property
    def own(self) -> list[Part]:
        """The parts that have weights of their own."""
        return [part for part in self.parts if not part.tied]


def divided_counts(structure: Structure) -> dict[str, int]:
    """What tensor parallelism divides evenly, and how many there are of each."""
    heads, kv_heads, _ = heads_of(structure.config)
    inner = int(getattr(structure.config, "intermediate_size", None) or 0)
    return {"attention heads": heads, "key and value heads": kv_heads, "numbers of the inner layer": inner}


def read_structure(spec: ModelSpec, number_bytes: int) -> Structure:
    """The parts of a model, with weights at `number_bytes` for each number. Raises ModelFolderError."""
    model = _empty_model(spec)
    tensor_plan = dict(getattr(model, "tp_plan", None) or {})
    parts = _parts(model, tensor_plan)
    tensors = _tensors(spec)
    quantised = getattr(model.config, "quantization_config", None) is not None
    unused = _count(spec, model, parts, tensors, number_bytes, check=not quantised)
    return Structure(
        architecture=type(model).__name__,
        parts=list(parts.values()),
        config=model.config.get_text_config(),
        tensor_plan=tensor_plan,
        unused=unused,
    )


def _empty_model(spec: ModelSpec) -> Any:
    kind: Any = transformers.AutoModelForCausalLM
    try:
        if spec.source == "gguf":
            config = transformers.AutoConfig.from_pretrained(spec.folder, gguf_file=spec.file, **LOCAL)
        else:
            config = transformers.AutoConfig.from_pretrained(spec.folder, **LOCAL)
            architecture = (read_json(spec.folder / "config.json").get("architectures") or [""])[0]
            kind = getattr(transformers, str(architecture), transformers.AutoModel)
            if spec.kind == "embed":
                kind = transformers.AutoModel
        with torch.device("meta"):
            made = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    except ModelFolderError:
        raise
    except Exception as error:
        raise ModelFolderError(
            f"{spec.folder} can't be planned: transformers makes no model of its configuration "
            f"({type(error).__name__}: {error})"
        ) from error
    return made


def _parts(model: Any, tensor_plan: Mapping[str, str]) -> dict[str, Part]:
    whole = set(model._no_split_modules or ())  # noqa: SLF001 (it has no public name)
    modules = dict(model.named_modules())
    layers = {name for name, module in modules.items() if name and type(module).__name__ in whole}
    if not layers:
        layers = set(_listed(modules))
    layers = {name for name in layers if not any(name.startswith(f"{other}.") for other in layers)}
    numbered = {name for name in layers if _LAYER.search(name) is not None}
    above = {name.rsplit(".", depth)[0] for name in layers for depth in range(1, name.count(".") + 1)} | {""}

    def part_of(parameter: str) -> str:
        """The shortest part of its name that is above no layer."""
        pieces = parameter.split(".")
        names = (".".join(pieces[:count]) for count in range(1, len(pieces)))
        return next((name for name in names if name not in above), parameter)

    tied: Mapping[str, str] = model.all_tied_weights_keys
    parts: dict[str, Part] = {}
    divided: dict[str, int] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        where = part_of(name)
        part = parts.setdefault(where, Part(name=where, layer=where in numbered, numbers=0))
        source = part_of(tied[name]) if name in tied else ""
        if source and source != where:
            part.tied = source
        part.numbers += tensor.numel()
        if _divides(name, tensor_plan):
            divided[where] = divided.get(where, 0) + tensor.numel()
    for name, tensor in model.named_buffers():
        if name in model.state_dict():
            where = part_of(name)
            parts.setdefault(where, Part(name=where, layer=where in numbered, numbers=0)).numbers += tensor.numel()
    for where, numbers in divided.items():
        parts[where].divided = numbers / parts[where].numbers
    return parts


def _listed(modules: Mapping[str, Any]) -> Iterator[str]:
    """The entries of module lists, for models that do not name their layers."""
    for name, module in modules.items():
        if isinstance(module, torch.nn.ModuleList):
            yield from (f"{name}.{index}" for index in range(len(module)))


def _divides(parameter: str, tensor_plan: Mapping[str, str]) -> bool:
    module = parameter.rpartition(".")[0]
    rules = [
        rule for pattern, rule in tensor_plan.items() if fnmatchcase(module, pattern) or fnmatchcase(parameter, pattern)
    ]
    return any(word in rule for rule in rules for word in _DIVIDING)


def _tensors(spec: ModelSpec) -> list[StoredTensor]:
    """Those of the transformer. What a sentence-transformers model has after it is small, and not counted."""
    try:
        tensors = [(part, tensor) for part, tensor in read_tensors(spec)]
    except UNREADABLE as error:
        raise ModelFolderError(f"{spec.folder} can't be planned: {error}") from error
    first = tensors[0][0] if tensors else ""
    found = [tensor for part, tensor in tensors if part == first]
    if not found or any(not tensor.name for tensor in found):
        raise ModelFolderError(
            f"{spec.folder} can't be planned: it has no safetensors or GGUF file, whose header names all weights"
        )
    return found


def _count(
    spec: ModelSpec, model: Any, parts: dict[str, Part], tensors: Iterable[StoredTensor], number_bytes: int, *,
    check: bool,
) -> str:  # fmt: skip
    """Adds the bytes of tensors to their parts. Returns what no part has. ModelFolderError: a part lacks weights or,
    with `check`, has fewer numbers than by the configuration.
    """
    unused: dict[str, int] = {}
    where = _from_gguf(model, parts) if spec.source == "gguf" else _from_names(model, parts)
    numbers = dict.fromkeys(parts, 0)
    for tensor in tensors:
        name = where(tensor.name)
        if name is None:
            unused[tensor.name] = tensor.bytes_at(number_bytes)
        if name is None or parts[name].tied:  # it is not loaded
            continue
        parts[name].weights_bytes += tensor.bytes_at(number_bytes)
        numbers[name] += tensor.numbers
    for part in parts.values():
        if not part.numbers or part.tied:
            continue
        if not part.weights_bytes or (check and numbers[part.name] < part.numbers * 0.95):
            raise ModelFolderError(
                f"{spec.folder} has {numbers[part.name]:,} numbers for {part.name}, which has {part.numbers:,} by its "
                "configuration: copy the model folder again"
            )
    return f"{min(unused)} and {len(unused) - 1} more, {gib(sum(unused.values()))}" if unused else ""


def _from_names(model: Any, parts: Mapping[str, Part]) -> Callable[[str], str | None]:
    """Finds the part of a tensor of safetensors files, whose names have a prefix if they are of a model with a head."""
    prefix = f"{model.base_model_prefix}."

    def find(name: str) -> str | None:
        for each in (name, name.removeprefix(prefix), prefix + name):
            pieces = each.split(".")
            for count in range(len(pieces), 0, -1):
                if (part := ".".join(pieces[:count])) in parts:
                    return part
        return None

    return find


def _from_gguf(model: Any, parts: Mapping[str, Part]) -> Callable[[str], str | None]:
    """Finds the part of a GGUF file's tensor; the names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""
    layers = {
        int(match[1]): name for name, part in parts.items() if part.layer and (match := _LAYER.search(name)) is not None
    }
    names = {id(module): name for name, module in model.named_modules()}
    known = {}
    with contextlib.suppress(KeyError):
        known["token_embd."] = names[id(model.get_input_embeddings())]
        known["output."] = names[id(model.get_output_embeddings())]
    norms = [name for name, part in parts.items() if not part.layer and name not in known.values()]
    if len(norms) == 1:
        known["output_norm."] = norms[0]

    def find(name: str) -> str | None:
        if (match := _GGUF_LAYER.match(name)) is not None:
            return layers.get(int(match[1]))
        return next((part for start, part in known.items() if name.startswith(start)), None)

    return find
