"""An embedding model on torch: from a folder to vectors.

A model is a transformer, a pooling of its token vectors, and perhaps a dense layer and a normalisation, as the folder
says. A plain Hugging Face folder gets mean pooling without normalisation, as in sentence-transformers. Everything after
the transformer is computed in float32.

On a CPU most of the work is in linear layers. PyTorch computes them with MKL, which does not use AVX-512 on every
processor that has it. oneDNN does, and is faster on weights that are laid out for it, so linear layers are replaced at
load. A trial compares the vectors.

Importing this module takes seconds (torch, transformers), so only the engine process does.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor, nn

from multigpu_worker.engines.common.pretrained import LOCAL, load_weights, loading, transformers
from multigpu_worker.engines.common.torch_runtime import bind, dtype_of, memory_errors
from multigpu_worker.engines.embed import joined as embed_joined
from multigpu_worker.engines.embed.backend import identity_of
from multigpu_worker.engines.embed.steps import Pooling, build_steps
from multigpu_worker.engines.embed.text import Inputs, TextInput, default_prompt, load_text_input
from multigpu_worker.repository.folders import ModelLayout, check_model_folder, read_layout

# Tokens in one forward pass. On an AMD core 250 tokens reach full speed. On an Intel core a pass costs as much as 40
# tokens, and 1,024 keep the time between two beats short. A GPU needs enough to fill it.
CPU_TOKENS_PER_THREAD = 1024
CUDA_TOKENS = 16_384
# Rows to lay the weights out for; oneDNN takes any number later.
PACK_ROWS = 512

# Texts for the trials at load, of different lengths. The first is also tried alone.
TRIAL_TEXTS = ("One sentence of nine words tries the model out.", "Short.", "Many words follow one another here, " * 4)
# Largest difference of token vectors between two libraries that round differently, relative to the largest component.
TRIAL_TOLERANCE = 1e-4

log = structlog.get_logger(__name__)


class PackedLinear(nn.Module):
    """A float32 linear layer on the CPU whose weights are laid out for oneDNN. Equal except for rounding."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        # Named as in nn.Linear: some models read weight.dtype. Other operations on it raise.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACK_ROWS)  # noqa: SLF001 (no public name)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # noqa: SLF001 (no public name)
        return y


@dataclass(slots=True, kw_only=True)
class EmbedModel:
    """An EmbedBackend on torch."""

    text: TextInput
    transformer: nn.Module
    pooling: Pooling
    steps: nn.Sequential
    device: torch.device
    precision: str
    # Of a forward pass. 0: torch's default.
    threads: int
    tokens_max: int
    dimension: int = 0
    identity: str = ""
    # For texts that are joined without padding, the first position of each. None: texts are padded.
    first_position: int | None = None

    @property
    def pads(self) -> bool:
        return self.first_position is None

    def embed(self, inputs: Inputs) -> npt.NDArray[np.float32]:
        """Vectors [rows, dimension] of padded inputs. Raises MemoryError, on any device."""
        bind(self.threads, tf32=self.precision == "tf32")
        with memory_errors(), torch.inference_mode():
            tensors = {name: torch.from_numpy(array).to(self.device) for name, array in inputs.items()}
            vectors: npt.NDArray[np.float32] = self.forward(**tensors).cpu().numpy()
        return vectors

    def embed_tokens(self, inputs: Inputs) -> npt.NDArray[np.float32]:
        """Token vectors [rows, width, components] of padded inputs. Raises MemoryError, on any device."""
        bind(self.threads, tf32=self.precision == "tf32")
        with memory_errors(), torch.inference_mode():
            tensors = {name: torch.from_numpy(array).to(self.device) for name, array in inputs.items()}
            vectors: npt.NDArray[np.float32] = self._token_vectors(tensors).cpu().numpy()
        return vectors

    def forward(self, *, pooled_by: Tensor | None = None, **inputs: Tensor | None) -> Tensor:
        """As `embed`, on tensors.

        `pooled_by`: the mask [rows, width] to pool by, if the transformer gets none or one of another form.
        """
        mask = inputs["attention_mask"] if pooled_by is None else pooled_by
        assert mask is not None
        vectors: Tensor = self.steps(self.pooling(self._token_vectors(inputs), mask))
        return vectors

    def _token_vectors(self, inputs: Mapping[str, Tensor | None]) -> Tensor:
        if self.first_position is None:
            tokens: Tensor = self.transformer(**inputs)[0]
        else:
            tokens = embed_joined.forward(self.transformer, self.first_position, inputs)
        return tokens.float()


def load_model(
    folder: Path,
    device: str,
    precision: str,
    *,
    threads: int = 0,
    pack: bool = True,
    allow_pickle: tuple[str, ...] = (),
    placed: Mapping[str, Any] | None = None,
) -> EmbedModel:
    """Load a model. Raises ModelFolderError, MemoryError.

    `pack`: on a CPU, pack the weights and join texts where that is possible. An export needs plain layers.
    `allow_pickle`: pickled weights that may be loaded, by their path in the folder. `placed`: see placement.
    """
    check_model_folder(folder, allow_pickle)
    layout = read_layout(folder)
    with loading(folder, "AutoModel"):
        dtype, pickled = dtype_of(precision), bool(allow_pickle)
        transformer = _load_transformer(layout.transformer, dtype, pickled=pickled, placed=placed or {}).eval()
        if not placed:
            transformer = transformer.to(torch.device(device))
        model = _load(folder, layout, transformer, torch.device(device), precision, threads)
        if pack and not placed and device == "cpu" and dtype == torch.float32:
            _pack(folder, model.transformer, _trial(model, 1))
            trial = {name: torch.from_numpy(array) for name, array in _trial(model, len(TRIAL_TEXTS)).items()}
            model.first_position = embed_joined.join(model.transformer, trial, TRIAL_TOLERANCE)
        return model


def _load(
    folder: Path, layout: ModelLayout, transformer: Any, device: torch.device, precision: str, threads: int
) -> EmbedModel:
    prompt = default_prompt(folder)
    pooling, steps = build_steps(layout, prompt)
    takes_types = "token_type_ids" in inspect.signature(transformer.forward).parameters
    text, _ = load_text_input(
        layout.transformer, folder, transformer.config, prompt=prompt, uses_token_type_ids=takes_types
    )
    model = EmbedModel(
        text=text,
        transformer=transformer,
        pooling=pooling,
        steps=steps.to(device),
        device=device,
        precision=precision,
        threads=threads,
        tokens_max=CPU_TOKENS_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else CUDA_TOKENS,
        identity=identity_of(
            "torch",
            precision,
            device.type,
            packages=("torch", "transformers", "safetensors"),
            sources=("embed/model.py", "embed/joined.py", "embed/cuda.py", "embed/steps.py", "common/torch_runtime.py"),
        ),
    )
    model.dimension = model.embed(_trial(model, 1)).shape[1]
    return model


def _trial(model: EmbedModel, texts: int) -> Inputs:
    """The inputs of the first of TRIAL_TEXTS."""
    return model.text.pad(model.text.tokenise(TRIAL_TEXTS[:texts]), range(texts))


def _load_transformer(folder: Path, dtype: torch.dtype, *, pickled: bool, placed: Mapping[str, Any]) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    # Of an encoder and a decoder, sentences need only the encoder.
    kind = transformers.AutoModelForTextEncoding if config.is_encoder_decoder else transformers.AutoModel
    return load_weights(kind, folder, pickled=pickled, unused="pooler.", config=config, dtype=dtype, **placed)


@torch.inference_mode()
def _pack(folder: Path, transformer: nn.Module, inputs: Inputs) -> None:
    """Replace the linear layers by packed ones, unless the trial fails or its vectors differ."""
    trial = {name: torch.from_numpy(array) for name, array in inputs.items()}
    before = transformer(**trial)[0]
    places = [
        (parent, name, child)
        for parent in transformer.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear  # subclasses may compute something else
    ]
    try:
        for parent, name, linear in places:
            setattr(parent, name, PackedLinear(linear))
        difference = ((transformer(**trial)[0] - before).abs().max() / before.abs().max()).item()
        problem = "" if difference < TRIAL_TOLERANCE else f"token vectors differ by {difference:.1e}"
    except (AttributeError, RuntimeError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        log.warning("model runs on plain linear layers, about half as fast", folder=str(folder), problem=problem)
        for parent, name, linear in places:
            setattr(parent, name, linear)
