"""One embedding model in memory: from a folder to vectors.

A model is a transformer, a pooling that makes one vector of its token vectors, and perhaps a dense layer and a
normalisation. The folder says which; a plain Hugging Face folder says nothing, and gets mean pooling and no
normalisation, as sentence-transformers would give it. All vectors after pooling are computed in float32.

On the CPU the linear layers are most of the work, and PyTorch gives them to MKL, which does not use AVX-512 on every
processor that has it. oneDNN, which comes with PyTorch too, does, and is faster still on weights laid out for it
once, at load. So linear layers are replaced by such ones; a sentence through the model before and after decides
whether the exchange was good.

Nothing is ever fetched: the hub is switched off before transformers is imported. Importing this module takes seconds
(torch, transformers), so only the engine process does, and only when there is something to embed.
"""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# What it would report about weights that don't fit is checked below.
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import numpy as np
import numpy.typing as npt
import structlog
import torch
import transformers
from torch import Tensor, nn

from multigpu_worker.engines.embed_steps import Pooling, build_steps
from multigpu_worker.engines.models import ModelFolderError, ModelLayout, check_model_folder, read_layout, read_object

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Longest text in tokens where neither the tokenizer nor the model names a limit.
TOKENS_PER_TEXT_MAX = 32_768
# Padded tokens that go through the model at once. On one core 512 are as fast as any more, and keep the time between
# two beats short; a GPU wants enough to fill it.
CPU_TOKENS_PER_THREAD = 512
CUDA_TOKENS = 16_384
# Rows that oneDNN lays the weights out for; it takes any number later.
PACK_ROWS = CPU_TOKENS_PER_THREAD

# A sentence for the trial at load: any text will do.
TRIAL_TEXT = "One sentence of nine words tries the model out."
# Largest difference between one sentence's token vectors by two libraries that round differently, against their size.
TRIAL_TOLERANCE = 1e-4

# How PyTorch's allocator and oneDNN say that memory ran out on the CPU: neither has an exception for it.
CPU_MEMORY_ERRORS = (
    "DefaultCPUAllocator",
    "could not create a primitive",
    "could not execute a primitive",
    "could not create a memory",
)

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
class Tokens:
    """Tokenised texts: for each input of the model (input_ids and perhaps token_type_ids), the numbers of each text."""

    columns: dict[str, list[list[int]]]

    def lengths(self) -> npt.NDArray[np.int64]:
        return np.fromiter(map(len, self.columns["input_ids"]), dtype=np.int64)


@dataclass(slots=True, kw_only=True)
class EmbedModel:
    """A model that is loaded. `tokenise` and `pad` may be called in one thread while `embed` runs in another."""

    tokenizer: Any
    transformer: nn.Module
    pooling: Pooling
    steps: nn.Sequential
    device: torch.device
    tokens_per_text_max: int
    # Put before every text, as the folder's own configuration asks.
    prompt: str
    # Inputs of the model besides the attention mask, and what they are padded with.
    inputs: dict[str, int]
    # Padded tokens that go through the model at once. The engine lowers it when memory runs out.
    tokens_max: int
    # Components of a vector.
    dimension: int = 0

    def tokenise(self, texts: Sequence[str]) -> Tokens:
        """Tokens of each text, with special tokens, cut at tokens_per_text_max: exactly AutoTokenizer's."""
        if self.prompt:
            texts = [self.prompt + text for text in texts]
        if not self.tokenizer.is_fast:
            encoded = self.tokenizer(list(texts), truncation=True, max_length=self.tokens_per_text_max, padding=False)
            return Tokens(columns={name: encoded[name] for name in self.inputs})
        # What AutoTokenizer calls, less what it does for offsets and for callers that want them. Not under the GIL.
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(texts)
        columns = {"input_ids": [encoding.ids for encoding in encodings]}
        if "token_type_ids" in self.inputs:
            columns["token_type_ids"] = [encoding.type_ids for encoding in encodings]
        return Tokens(columns=columns)

    def pad(self, tokens: Tokens, rows: Sequence[int]) -> dict[str, Tensor]:
        """The model's inputs for the texts `rows`: int64 [rows, longest], with the attention mask.

        The padding is always on the right, even where the tokenizer would put it on the left (for the sake of
        generating on from the end): so a text's positions, and its vector, don't depend on what it is padded against.
        """
        width = max(len(tokens.columns["input_ids"][row]) for row in rows)
        arrays = {name: np.full((len(rows), width), filler) for name, filler in self.inputs.items()}
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for i, row in enumerate(rows):
            length = len(tokens.columns["input_ids"][row])
            mask[i, :length] = 1
            for name, array in arrays.items():
                array[i, :length] = tokens.columns[name][row]
        return {name: torch.from_numpy(array) for name, array in (arrays | {"attention_mask": mask}).items()}

    def embed(self, inputs: dict[str, Tensor]) -> npt.NDArray[np.float32]:
        """Vectors [rows, dimension] of padded inputs. Raises MemoryError, on any device, if memory runs out."""
        try:
            return self._embed(inputs)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in CPU_MEMORY_ERRORS):
                raise MemoryError(str(error)) from error
            raise

    @torch.inference_mode()
    def _embed(self, inputs: dict[str, Tensor]) -> npt.NDArray[np.float32]:
        inputs = {name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()}
        tokens = self.transformer(**inputs)[0].float()
        vectors: Tensor = self.steps(self.pooling(tokens, inputs["attention_mask"]))
        array: npt.NDArray[np.float32] = vectors.cpu().numpy()
        return array


def load_model(folder: Path, device: str, precision: str) -> EmbedModel:
    """Load a model. Raises ModelFolderError, with the cause and the remedy; torch.OutOfMemoryError may pass."""
    check_model_folder(folder)
    layout = read_layout(folder)
    try:
        return _load(folder, layout, torch.device(device), PRECISIONS[precision])
    except (ModelFolderError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise ModelFolderError(
            f"{folder} can't be loaded: {type(error).__name__}: {error}. Try it with "
            "transformers.AutoModel.from_pretrained, and copy the model folder again if that fails too"
        ) from error


def _load(folder: Path, layout: ModelLayout, device: torch.device, dtype: torch.dtype) -> EmbedModel:
    settings = _transformer_settings(layout.transformer)
    prompt = _default_prompt(folder)
    pooling, steps = build_steps(layout, prompt)
    transformer = _load_transformer(layout.transformer, dtype).eval()
    tokenizer, tokens_per_text_max = _load_tokenizer(layout.transformer, settings, transformer.config)
    known = inspect.signature(transformer.forward).parameters
    fillers = {"input_ids": tokenizer.pad_token_id or 0}
    if "token_type_ids" in tokenizer.model_input_names and "token_type_ids" in known:
        fillers["token_type_ids"] = tokenizer.pad_token_type_id
    model = EmbedModel(
        tokenizer=tokenizer,
        transformer=transformer.to(device),
        pooling=pooling,
        steps=steps.to(device),
        device=device,
        tokens_per_text_max=tokens_per_text_max,
        prompt=prompt,
        inputs=fillers,
        tokens_max=CPU_TOKENS_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else CUDA_TOKENS,
    )
    trial = model.pad(model.tokenise([TRIAL_TEXT]), [0])
    model.dimension = model.embed(trial).shape[1]
    if device.type == "cpu" and dtype == torch.float32:
        _pack(folder, transformer, trial)
    return model


def _load_transformer(folder: Path, dtype: torch.dtype) -> Any:
    options = {"local_files_only": True, "trust_remote_code": False}
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    # Of a model with an encoder and a decoder, sentences need the first alone.
    kind = transformers.AutoModelForTextEncoding if config.is_encoder_decoder else transformers.AutoModel
    transformer, report = kind.from_pretrained(
        folder, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
    )
    # transformers would fill them with random numbers and go on. Nothing reads the pooler.
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing or report["mismatched_keys"]:
        names = ", ".join(str(key) for key in [*missing, *report["mismatched_keys"]][:3])
        raise ModelFolderError(
            f"{folder} has weights that don't fit its config.json ({names} …): copy the model folder again"
        )
    return transformer


def _load_tokenizer(folder: Path, settings: dict[str, Any], config: Any) -> tuple[Any, int]:
    """The tokenizer, set to cut at the limit, and the limit in tokens."""
    limit = settings.get("max_seq_length")
    options = {} if limit is None else {"model_max_length": limit}
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, **options
    )
    positions = getattr(config, "max_position_embeddings", None)
    limits = [tokenizer.model_max_length, TOKENS_PER_TEXT_MAX]
    if limit is None and positions is not None and positions > 0:
        limits.append(positions)
    tokens_per_text_max = int(min(limits))
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        backend.no_padding()
        backend.enable_truncation(tokens_per_text_max, direction=tokenizer.truncation_side)
        if settings.get("do_lower_case"):
            _lower_case(backend)
    elif settings.get("do_lower_case"):
        raise ModelFolderError(f"{folder} asks for do_lower_case, and its tokenizer has no tokenizer.json for that")
    return tokenizer, tokens_per_text_max


def _lower_case(backend: Any) -> None:
    """Lower case before all else, as sentence-transformers does; twice does no harm."""
    from tokenizers import normalizers  # noqa: PLC0415 (rarely needed)

    before = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])


def _transformer_settings(folder: Path) -> dict[str, Any]:
    """What sentence-transformers adds: the length to cut at, lower case. The file was once named after the model."""
    for path in sorted(folder.glob("sentence_*_config.json")):
        settings = read_object(path)
        task = settings.get("transformer_task", "feature-extraction")
        if task != "feature-extraction":
            raise ModelFolderError(f"{path} has transformer_task {task!r}: only feature-extraction is supported")
        return settings
    return {}


def _default_prompt(folder: Path) -> str:
    path = folder / "config_sentence_transformers.json"
    if not path.exists():
        return ""
    config = read_object(path)
    name = config.get("default_prompt_name")
    if name is None:
        return ""
    try:
        return str(config["prompts"][name])
    except (KeyError, TypeError) as error:
        raise ModelFolderError(f"{path} has default_prompt_name {name!r} and no such prompt: add it") from error


@torch.inference_mode()
def _pack(folder: Path, transformer: nn.Module, trial: dict[str, Tensor]) -> None:
    """Exchange the linear layers for packed ones, unless the trial then fails or gives something else."""
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
