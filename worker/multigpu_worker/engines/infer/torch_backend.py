"""The infer engine's back end on torch: exported programs, Hugging Face folders, and weights with a class.

- torch-export: a `.pt2` of torch.export, which determines the precision and the names, types and shapes of inputs.
  Loading one can run any code, so model.toml must name it under allow_pickle.
- huggingface, sentence-transformers: the class that config.json names. Inputs are the parameters of its `forward`.
- safetensors: `class` under [parameters] is "module:Class", a torch.nn.Module. It is created with the JSON object
  `arguments` as keywords (default: none), and the file is its state. Inputs are the parameters of its `forward`.

Outputs have the names of the model's dict; others are `output`, or `output_0`, `output_1` ….

Importing this module takes seconds (torch), so only the engine process does.
"""

import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.engines.common.tensors import Arrays, TensorSpec
from multigpu_worker.engines.common.torch_runtime import bind, dtype_of, memory_errors
from multigpu_worker.engines.infer.backend import examples_max, is_per_example
from multigpu_worker.repository.files import pickle_rejection, weight_files
from multigpu_worker.repository.folders import ModelFolderError, read_layout, read_object
from multigpu_worker.repository.model import ModelSpec

# Inputs of transformers' models, by parameter of `forward`: type and number of dimensions.
HUGGINGFACE_INPUTS = {
    "input_ids": ("int64", 2),
    "attention_mask": ("int64", 2),
    "token_type_ids": ("int64", 2),
    "position_ids": ("int64", 2),
    "decoder_input_ids": ("int64", 2),
    "pixel_values": ("float32", 4),
    "input_values": ("float32", 2),
    "input_features": ("float32", 3),
}


_HALVES = frozenset({torch.bfloat16, torch.float16})


@dataclass(slots=True, kw_only=True)
class TorchForward:
    """A Forward on torch."""

    module: Callable[..., Any]
    inputs: tuple[TensorSpec, ...]
    device: torch.device
    # Type to which floating-point inputs are converted. None: they are not.
    dtype: torch.dtype | None
    precision: str
    outputs: tuple[TensorSpec, ...] = ()
    threads: int = 0
    # Examples in one forward pass. While loading, 0: the model sets no limit.
    examples_max: int = 0
    # Names of the inputs that are passed by position, in order.
    positional: tuple[str, ...] = ()
    # See backend.py. Only exported programs declare it.
    per_example: bool | None = None

    def __call__(self, inputs: Arrays) -> Arrays:
        """Return all outputs. Raises MemoryError if the host or the device has too little."""
        bind(self.threads, tf32=self.precision == "tf32")
        with memory_errors(), torch.inference_mode():
            tensors = {name: self._tensor(array) for name, array in inputs.items()}
            places = [tensors.pop(name) for name in self.positional if name in tensors]
            named = name_outputs(self.module(*places, **tensors))
            return {name: _array(tensor) for name, tensor in named.items()}

    def _tensor(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(array).to(self.device)
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor


def _array(tensor: Tensor) -> Any:
    # NumPy has no bfloat16; float32 represents every value of both 16-bit types.
    return (tensor.float() if tensor.dtype in _HALVES else tensor).cpu().numpy()


def name_outputs(found: Any) -> dict[str, Tensor]:
    """The tensors among the results of a forward pass, by name. Raises TypeError if there are none."""
    if isinstance(found, Tensor):
        return {"output": found}
    if isinstance(found, dict):
        named = {str(name): value for name, value in found.items()}
    elif isinstance(found, (tuple, list)):
        named = {f"output_{i}": value for i, value in enumerate(found)}
    else:
        named = {}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    if not tensors:
        raise TypeError(f"the model returns {type(found).__name__}: a tensor is needed, or a dict or tuple of them")
    return tensors


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> tuple[TorchForward, dict[str, str]]:
    """Load a model. See common/backends.py."""
    dtype_of(precision)
    bind(settings.threads, tf32=precision == "tf32")
    loaders = {"torch-export": _load_export, "safetensors": _load_class}
    try:
        limit = examples_max(spec, settings.device)
        with memory_errors():
            forward = loaders.get(spec.source, _load_huggingface)(spec, torch.device(settings.device), precision)
    except (ModelFolderError, MemoryError):
        raise
    except Exception as error:
        raise ModelFolderError(f"{spec.folder} can't be loaded: {type(error).__name__}: {error}") from error
    forward.threads = settings.threads
    forward.examples_max = min(limit, forward.examples_max or limit)
    return forward, {}


def _load_export(spec: ModelSpec, device: torch.device, precision: str) -> TorchForward:
    if precision not in {"fp32", "tf32"}:
        raise PrecisionError(f"{spec.id} was exported at its precision: leave {precision} out, or export it so again")
    path = spec.folder / spec.file
    if spec.file not in spec.allow_pickle:  # torch unpickles parts of it, and evaluates the expressions of sizes
        raise ModelFolderError(pickle_rejection(path, spec.file))
    program = torch.export.load(path)
    nodes = {node.name: node for node in program.graph.nodes}
    user_inputs = [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
    by_place = program.call_spec.in_spec.child(0).num_children
    keywords = program.call_spec.in_spec.child(1).context
    if program.call_spec.in_spec.num_leaves != by_place + len(keywords) or len(user_inputs) != by_place + len(keywords):
        raise ModelFolderError(f"{path} takes lists or dicts: export a module whose inputs are tensors, each by itself")
    names = [*user_inputs[:by_place], *keywords]
    inputs, limits = [], []
    for name, node_name in zip(names, user_inputs, strict=True):
        value = nodes[node_name].meta["val"]
        inputs.append(_spec_of(name, value))
        if value.ndim and isinstance(value.shape[0], torch.SymInt):
            bound = program.range_constraints.get(value.shape[0].node.expr)
            limits += [int(bound.upper)] if bound is not None and bound.upper.is_Integer else []
    found = [_first_of(nodes[name].meta["val"]) for name in user_inputs]
    outputs = _outputs_of(program, nodes)
    found += [_first_of(value) for value in outputs.values()]
    from torch.export.passes import move_to_device_pass  # noqa: PLC0415  (only for this source)

    program = move_to_device_pass(program, device)
    return TorchForward(
        module=program.module(),
        inputs=tuple(inputs),
        outputs=tuple(_spec_of(name, value, _HALVES) for name, value in outputs.items()),
        device=device,
        dtype=None,
        precision=precision,
        examples_max=min(limits, default=0),
        positional=tuple(names[:by_place]),
        per_example=is_per_example(found),
    )


def _spec_of(name: str, value: Tensor, widened: frozenset[torch.dtype] = frozenset({torch.bfloat16})) -> TensorSpec:
    """`widened`: the types that are float32 outside of the model."""
    dtype = "float32" if value.dtype in widened else str(value.dtype).removeprefix("torch.")
    return TensorSpec(name=name, dtype=dtype, shape=tuple(s if isinstance(s, int) else None for s in value.shape))


def _first_of(value: Tensor) -> int | str:
    size = value.shape[0] if value.ndim else 0
    return size if isinstance(size, int) else str(size.node.expr)


def _outputs_of(program: torch.export.ExportedProgram, nodes: dict[str, torch.fx.Node]) -> dict[str, Tensor]:
    """The traced outputs of the program, by the names that they have in results."""
    values = [nodes[name].meta["val"] if name in nodes else None for name in program.graph_signature.user_outputs]
    return name_outputs(tree_unflatten(values, program.call_spec.out_spec))


def _load_huggingface(spec: ModelSpec, device: torch.device, precision: str) -> TorchForward:
    from multigpu_worker.engines.common.pretrained import load_weights, transformers  # noqa: PLC0415  (takes seconds)

    folder = read_layout(spec.folder).transformer
    part = folder.relative_to(spec.folder).as_posix()
    if not weight_files(spec.folder, "" if part == "." else part, spec.allow_pickle):
        raise ModelFolderError(f"{folder} has no weights: model.safetensors is missing")
    architecture = next(iter(read_object(folder / "config.json").get("architectures") or ()), "")
    kind = getattr(transformers, architecture, transformers.AutoModel)
    model = load_weights(kind, folder, pickled=bool(spec.allow_pickle), dtype=dtype_of(precision))
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    known = inspect.signature(model.forward).parameters
    inputs = [
        TensorSpec(name=name, dtype=dtype, shape=(None,) * dimensions, required=name == model.main_input_name)
        for name, (dtype, dimensions) in HUGGINGFACE_INPUTS.items()
        if name in known
    ]
    if not inputs:
        raise ModelFolderError(f"{folder}: {architecture} takes none of {', '.join(HUGGINGFACE_INPUTS)}: export it")
    return _of_module(model, tuple(inputs), device, precision)


def _load_class(spec: ModelSpec, device: torch.device, precision: str) -> TorchForward:
    path, name = spec.folder / spec.file, spec.parameters.get("class", "")
    module_name, _, class_name = name.partition(":")
    if not class_name:
        raise ModelFolderError(f'{path} holds weights alone: name their class in model.toml, class = "module:Class"')
    module = getattr(importlib.import_module(module_name), class_name)(
        **json.loads(spec.parameters.get("arguments", "{}"))
    )
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file  # noqa: PLC0415  (only for this source)

        state = load_file(path)
    elif spec.file in spec.allow_pickle:
        # The owner of the repository declared this file trusted.
        state = torch.load(path, map_location="cpu", weights_only=False)
    else:
        raise ModelFolderError(pickle_rejection(path, spec.file))
    module.load_state_dict(state)
    parameters = inspect.signature(module.forward).parameters.values()
    inputs = tuple(
        TensorSpec(name=each.name, required=each.default is inspect.Parameter.empty)
        for each in parameters
        if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY}
    )
    return _of_module(module.to(dtype_of(precision)), inputs, device, precision)


def _of_module(module: nn.Module, inputs: tuple[TensorSpec, ...], device: torch.device, precision: str) -> TorchForward:
    return TorchForward(
        module=module.eval().to(device), inputs=inputs, device=device, dtype=dtype_of(precision), precision=precision
    )
