"""One embedding model in memory: from a folder to vectors.

A model is a transformer, a pooling that makes one vector of its token vectors, and perhaps a dense layer and a
normalisation. The folder says which; a plain Hugging Face folder says nothing, and gets mean pooling and no
normalisation, as sentence-transformers would give it. All vectors after pooling are computed in float32.

On the CPU the linear layers are most of the work, and PyTorch gives them to MKL, which does not use AVX-512 on every
processor that has it. oneDNN, which comes with PyTorch too, does, and is faster still on weights laid out for it
once, at load. So linear layers are replaced by such ones; a sentence through the model before and after decides
whether the exchange was good.

Importing this module takes seconds (torch, transformers), so only the engine process does, and only when there is
something to embed.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from multigpu.repository.model import ModelSpec
from torch import Tensor, nn

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.offline import transformers
from multigpu_worker.engines.common.torch_runtime import bind, dtype_of, memory_errors
from multigpu_worker.engines.embed import joined as embed_joined
from multigpu_worker.engines.embed.backend import EmbedBackend, identity_of
from multigpu_worker.engines.embed.steps import Pooling, build_steps
from multigpu_worker.engines.embed.text import Inputs, TextInput, default_prompt, load_tokenizer
from multigpu_worker.models.folders import ModelFolderError, ModelLayout, check_model_folder, read_layout

# Tokens that go through the model at once. On an AMD 250 on a core are as fast as any more; on an Intel a forward pass
# costs as much as 40 tokens, and 1,024 keep the time between two beats short. A GPU wants enough to fill it.
CPU_TOKENS_PER_THREAD = 1024
CUDA_TOKENS = 16_384
# Rows that oneDNN lays the weights out for; it takes any number later.
PACK_ROWS = 512

# For the trials at load: any texts will do, if they are of unlike lengths. The first is tried by itself.
TRIAL_TEXTS = ("One sentence of nine words tries the model out.", "Short.", "Many words follow one another here, " * 4)
# Largest difference between one sentence's token vectors by two libraries that round differently, against their size.
TRIAL_TOLERANCE = 1e-4

log = structlog.get_logger(__name__)


class PackedLinear(nn.Module):
    """A linear layer of float32 on the CPU whose weights are laid out for oneDNN. Same numbers but for rounding."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        # Named as in nn.Linear: some models ask for weight.dtype. Arithmetic with it from outside raises.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACK_ROWS)  # noqa: SLF001 (no public name)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # noqa: SLF001 (no public name)
        return y


@dataclass(slots=True, kw_only=True)
class EmbedModel:
    """A model that is loaded by torch: an EmbedBackend."""

    text: TextInput
    transformer: nn.Module
    pooling: Pooling
    steps: nn.Sequential
    device: torch.device
    precision: str
    # Of a forward pass; 0: torch's own choice.
    threads: int
    # Padded tokens that go through the model at once. The engine lowers it when memory runs out.
    tokens_max: int
    # Components of a vector.
    dimension: int = 0
    identity: str = ""
    # Of texts that go through joined, without padding: what their positions count from. None: they are padded.
    first_position: int | None = None

    @property
    def pads(self) -> bool:
        return self.first_position is None

    def embed(self, inputs: Inputs) -> npt.NDArray[np.float32]:
        """Vectors [rows, dimension] of padded inputs. Raises MemoryError, on any device, if memory runs out."""
        bind(self.threads, tf32=self.precision == "tf32")
        with memory_errors(), torch.inference_mode():
            tensors = {name: torch.from_numpy(array).to(self.device) for name, array in inputs.items()}
            vectors: npt.NDArray[np.float32] = self.forward(**tensors).cpu().numpy()
        return vectors

    def forward(self, *, pooled_by: Tensor | None = None, **inputs: Tensor | None) -> Tensor:
        """The same on tensors: what an export has to compute.

        `pooled_by`: the mask [rows, width] to pool by, where the transformer gets none, or one of another form.
        """
        mask = inputs["attention_mask"] if pooled_by is None else pooled_by
        assert mask is not None
        if self.first_position is None:
            tokens = self.transformer(**inputs)[0].float()
        else:
            tokens = embed_joined.forward(self.transformer, self.first_position, inputs).float()
        vectors: Tensor = self.steps(self.pooling(tokens, mask))
        return vectors


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> tuple[EmbedBackend, dict[str, str]]:
    """Load a model as backend.py says."""
    dtype_of(precision)
    bind(settings.threads, tf32=precision == "tf32")
    model = load_model(
        spec.folder, settings.device, precision, threads=settings.threads, allow_pickle=spec.allow_pickle
    )
    if model.device.type == "cuda":
        from multigpu_worker.engines.embed.cuda import speed_up  # noqa: PLC0415  it imports this module

        return speed_up(model, compiled=spec.parameters.get("compile") == "try")
    facts = {}
    if any(isinstance(m, PackedLinear) for m in model.transformer.modules()):
        facts["linear layers"] = "oneDNN, packed"
    if not model.pads:
        facts["texts"] = "joined, without padding"
    return model, facts


def load_model(
    folder: Path,
    device: str,
    precision: str,
    *,
    threads: int = 0,
    pack: bool = True,
    allow_pickle: tuple[str, ...] = (),
) -> EmbedModel:
    """Load a model. Raises ModelFolderError, with the cause and the remedy; MemoryError.

    `pack`: prepare the model for the CPU where that is possible: weights laid out, texts joined without padding. An
    export has to see plain layers.
    `allow_pickle`: weights in pickle's format that may be loaded, by their path in the folder.
    """
    check_model_folder(folder, allow_pickle)
    layout = read_layout(folder)
    try:
        with memory_errors():
            transformer = _load_transformer(layout.transformer, dtype_of(precision), pickled=bool(allow_pickle)).eval()
            model = _load(folder, layout, transformer, torch.device(device), precision, threads)
            if pack and device == "cpu" and dtype_of(precision) == torch.float32:
                _pack(folder, model.transformer, _trial(model, 1))
                trial = {name: torch.from_numpy(array) for name, array in _trial(model, len(TRIAL_TEXTS)).items()}
                model.first_position = embed_joined.join(model.transformer, trial, TRIAL_TOLERANCE)
            return model
    except (ModelFolderError, MemoryError):
        raise
    except Exception as error:
        raise ModelFolderError(
            f"{folder} can't be loaded: {type(error).__name__}: {error}. Try it with "
            "transformers.AutoModel.from_pretrained, and copy the model folder again if that fails too"
        ) from error


def _load(
    folder: Path, layout: ModelLayout, transformer: Any, device: torch.device, precision: str, threads: int
) -> EmbedModel:
    prompt = default_prompt(folder)
    pooling, steps = build_steps(layout, prompt)
    tokenizer, tokens_per_text_max = load_tokenizer(layout.transformer, folder, transformer.config)
    known = inspect.signature(transformer.forward).parameters
    fillers = {"input_ids": tokenizer.pad_token_id or 0}
    if "token_type_ids" in tokenizer.model_input_names and "token_type_ids" in known:
        fillers["token_type_ids"] = tokenizer.pad_token_type_id
    model = EmbedModel(
        text=TextInput(
            tokenizer=tokenizer.backend_tokenizer if tokenizer.is_fast else tokenizer,
            is_fast=tokenizer.is_fast,
            tokens_per_text_max=tokens_per_text_max,
            prompt=prompt,
            inputs=fillers,
        ),
        transformer=transformer.to(device),
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


def _load_transformer(folder: Path, dtype: torch.dtype, *, pickled: bool) -> Any:
    options = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    # Of a model with an encoder and a decoder, sentences need the first alone.
    kind = transformers.AutoModelForTextEncoding if config.is_encoder_decoder else transformers.AutoModel
    transformer, report = kind.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        # None: safetensors if there are any. Of a pickle, transformers takes plain tensors alone.
        use_safetensors=None if pickled else True,
        output_loading_info=True,
        **options,
    )
    # transformers would fill them with random numbers and go on. Nothing reads the pooler.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing or report["mismatched_keys"]:
        names = ", ".join(str(key) for key in [*missing, *report["mismatched_keys"]][:3])
        raise ModelFolderError(
            f"{folder} has weights that don't fit its config.json ({names} …): copy the model folder again"
        )
    return transformer


@torch.inference_mode()
def _pack(folder: Path, transformer: nn.Module, inputs: Inputs) -> None:
    """Exchange the linear layers for packed ones, unless the trial then fails or gives something else."""
    trial = {name: torch.from_numpy(array) for name, array in inputs.items()}
    before = transformer(**trial)[0]
    places = [
        (parent, name, child)
        for parent in transformer.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear  # subclasses may mean something else
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
