"""One language model in memory: from a folder to the logits of the next tokens.

Any decoder of transformers that uses its attention interface will do: the model keeps its own code but for attention,
which reads the paged cache (cache.py). Whether that comes to the same is not left to hope: at load a trial
text goes through the model as it came, and through the cache in pieces, and the logits must agree.

A GGUF file is dequantised by transformers, which takes long; the outcome is kept among the artifacts, so that it is
done once for a file and precision.
"""

import hashlib
import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import torch
from multigpu.config.values import from_text
from multigpu.repository.model import ModelSpec
from torch import Tensor

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.artifacts import Artifact, Artifacts
from multigpu_worker.engines.common.offline import transformers
from multigpu_worker.engines.common.torch_runtime import dtype_of, memory_errors
from multigpu_worker.engines.generate.cache import (
    ATTENTION,
    BLOCK_TOKENS,
    CacheShape,
    PagedCache,
    Piece,
    blocks_for,
    make_step,
)
from multigpu_worker.models.folders import ModelFolderError, check_model_folder

# Where a model names no limit.
CONTEXT_TOKENS = 2048
# What the cache takes if nothing else is said, at most: half of what the GPU has left, or so much of the host's memory.
CPU_CACHE_BYTES = 512 << 20
GPU_CACHE_SHARE = 0.5
# What model.toml may say in `parameters`.
PARAMETERS = ("cache_bytes", "context")
# Kinds of layers whose memory of the past is what the cache holds.
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Kinds of position encoding that change for all tokens of a step once one of them is past the original context.
CHANGING_ROPES = {"dynamic", "longrope"}

TRIAL_TEXT = "A trial: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen."
TRIAL_TOKENS = 24
# Largest difference between logits by two ways of rounding, against their size.
TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class GenerateModel:
    model: Any
    tokenizer: Any
    device: torch.device
    shape: CacheShape
    eos_ids: frozenset[int]
    # How many tokens it knows; a tokenizer's own additions may go past it.
    vocabulary: int
    # The most tokens of a sequence.
    context: int
    cache: PagedCache
    # The files it was loaded from, where they are an artifact.
    artifact: Artifact | None = None
    # How it was made, for people.
    facts: dict[str, str] = field(default_factory=dict)

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, without the special ones."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece], wanted: Sequence[int], cache: PagedCache | None = None) -> Tensor:
        """Logits after the last token of the wanted pieces: [wanted, vocabulary]. At least one must be wanted."""
        token_ids, positions, step = make_step(cache or self.cache, pieces, self.device)
        ends: list[int] = []
        for piece in pieces:
            ends.append((ends[-1] if ends else -1) + len(piece.token_ids))
        keep = torch.tensor([ends[index] for index in wanted], device=self.device)
        answer = self.model(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=keep, paged=step
        )
        logits: Tensor = answer.logits[0]
        return logits


def load_model(spec: ModelSpec, settings: EngineSettings, precision: str) -> GenerateModel:
    """Load a model and try it out. Raises ModelFolderError with the cause and the remedy, MemoryError."""
    disable_progress_bar: Any = transformers.utils.logging.disable_progress_bar
    disable_progress_bar()
    if unknown := sorted(set(spec.parameters) - set(PARAMETERS)):
        raise ModelFolderError(f"model.toml has parameters.{unknown[0]}: generate knows {' and '.join(PARAMETERS)}")
    try:
        with memory_errors():
            return _load(spec, settings, dtype_of(precision))
    except (ModelFolderError, MemoryError, OSError):
        raise
    except Exception as error:
        raise ModelFolderError(
            f"{spec.folder} can't be loaded: {type(error).__name__}: {error}. Try it with "
            "transformers.AutoModelForCausalLM.from_pretrained, and copy the model folder again if that fails too"
        ) from error


def _load(spec: ModelSpec, settings: EngineSettings, dtype: torch.dtype) -> GenerateModel:
    artifact = None
    if spec.source == "gguf" and settings.artifacts:
        artifact = _dequantised(spec, settings, dtype)
        model, tokenizer = _from_folder(artifact.folder, dtype)
    elif spec.source == "gguf":
        model, tokenizer = _from_gguf(spec, dtype)
    else:
        check_model_folder(spec.folder)
        model, tokenizer = _from_folder(spec.folder, dtype)
    config = model.config.get_text_config()
    _check_layers(spec, config)
    device = torch.device(settings.device)
    model = model.to(device).eval()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = CacheShape(layers=config.num_hidden_layers, heads=heads, head_size=head_size, dtype=dtype)
    loaded = GenerateModel(
        model=model,
        tokenizer=tokenizer,
        device=device,
        shape=shape,
        eos_ids=_eos_ids(model, tokenizer),
        vocabulary=int(model.get_input_embeddings().num_embeddings),
        context=_context(spec, config),
        cache=PagedCache(shape, 2 * blocks_for(TRIAL_TOKENS), device),
        artifact=artifact,
    )
    _try_out(loaded, spec)
    blocks = _blocks(spec, settings, loaded)
    loaded.cache = PagedCache(shape, blocks, device)
    loaded.context = min(loaded.context, blocks * BLOCK_TOKENS)
    cache_mib = blocks * BLOCK_TOKENS * shape.token_bytes / (1 << 20)
    loaded.facts = {
        "context": f"{loaded.context} tokens",
        "cache": f"{blocks} blocks of {BLOCK_TOKENS} tokens, {cache_mib:.1f} MiB",
    }
    return loaded


def _from_folder(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    kind: Any = transformers.AutoModelForCausalLM
    model, report = kind.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, output_loading_info=True, attn_implementation="sdpa", **options
    )
    # transformers would fill them with random numbers and go on.
    if missing := sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]])):
        raise ModelFolderError(
            f"{folder} has weights that don't fit its config.json ({', '.join(missing[:3])} …): copy the folder again"
        )
    return model, transformers.AutoTokenizer.from_pretrained(folder, **options)


def _from_gguf(spec: ModelSpec, dtype: torch.dtype) -> tuple[Any, Any]:
    options = {"gguf_file": spec.file, "local_files_only": True, "trust_remote_code": False}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        spec.folder, dtype=dtype, attn_implementation="sdpa", **options
    )
    return model, transformers.AutoTokenizer.from_pretrained(spec.folder, **options)


def _dequantised(spec: ModelSpec, settings: EngineSettings, dtype: torch.dtype) -> Artifact:
    """The folder of what a GGUF file holds, as transformers would save it."""
    path = spec.folder / spec.file
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelFolderError(f"{path} can't be read ({error}): copy the model there again") from error
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "gguf")}
    key = {"sha256": digest, "dtype": str(dtype), **versions}

    def build(folder: Path) -> dict[str, str]:
        log.info("dequantising a GGUF file, which is done once", file=str(path))
        model, tokenizer = _from_gguf(spec, dtype)
        # What is saved is not quantised any more; transformers would not save a model that says it is.
        model.is_quantized = False
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {"file": spec.file}

    return Artifacts(Path(settings.artifacts), settings.artifacts_bytes_max).get("dequantised", key, build)


def _check_layers(spec: ModelSpec, config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if kinds:
        raise ModelFolderError(
            f"{spec.folder} has layers of type {min(kinds)}: generate runs models whose layers are all "
            f"{' or '.join(sorted(LAYER_TYPES))}"
        )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)


def _context(spec: ModelSpec, config: Any) -> int:
    limit = getattr(config, "max_position_embeddings", None) or CONTEXT_TOKENS
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in CHANGING_ROPES:
        # Up to here it is the same for all, whoever else is in the step.
        limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    return min(int(limit), _number(spec, "context", int(limit)))


def _number(spec: ModelSpec, name: str, default: int) -> int:
    """A number from model.toml's parameters; bytes may have a unit."""
    text = spec.parameters.get(name)
    if text is None:
        return default
    try:
        value = int(from_text(text, int, name))
    except ValueError as error:
        raise ModelFolderError(f"model.toml's parameters.{name}: {error}") from error
    if value < 1:
        raise ModelFolderError(f"model.toml's parameters.{name} is {value}: it must be at least 1")
    return value


def _blocks(spec: ModelSpec, settings: EngineSettings, loaded: GenerateModel) -> int:
    """How many blocks the cache gets: enough for all slots at full context, if there is so much memory."""
    if loaded.device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(loaded.device)
        bytes_max = int(free_bytes * GPU_CACHE_SHARE)
    else:
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        bytes_max = min(CPU_CACHE_BYTES, host_bytes // 4)
    bytes_max = _number(spec, "cache_bytes", bytes_max)
    wished = settings.slots * blocks_for(loaded.context)
    blocks = min(wished, bytes_max // (BLOCK_TOKENS * loaded.shape.token_bytes))
    if blocks < 1:
        raise MemoryError(
            f"{bytes_max} bytes have no room for {BLOCK_TOKENS} tokens of {loaded.shape.token_bytes} bytes in the "
            "cache of keys and values: free memory on the device, or raise parameters.cache_bytes"
        )
    return blocks


@torch.inference_mode()
def _try_out(loaded: GenerateModel, spec: ModelSpec) -> None:
    """Two sequences, packed and in pieces, must come to what the model's own attention says of each alone."""
    ids = [int(token) for token in loaded.tokenizer(TRIAL_TEXT)["input_ids"]][:TRIAL_TOKENS]
    ids += [ids[-1]] * (TRIAL_TOKENS - len(ids))
    long, short = ids, ids[5:16]
    plain = [
        loaded.model(input_ids=torch.tensor([each], device=loaded.device), use_cache=False).logits[0, -1].float()
        for each in (long, short)
    ]
    loaded.model.set_attn_implementation(ATTENTION)
    if loaded.model.config.get_text_config()._attn_implementation != ATTENTION:  # noqa: SLF001 (no public name)
        raise ModelFolderError(
            f"{spec.folder} is a {type(loaded.model).__name__}, which has its own attention: generate needs a model "
            "that uses transformers' attention interface"
        )
    # Blocks out of order; a long piece beside a long one, one token beside a long piece, one token beside one token.
    middle = blocks_for(TRIAL_TOKENS)
    blocks = list(range(2 * middle - 1, -1, -1))
    long_blocks, short_blocks = blocks[:middle], blocks[middle:]
    cuts = [((0, 7), (0, 9)), ((7, len(long) - 1), (9, 10)), ((len(long) - 1, len(long)), (10, 11))]
    for (a, b), (c, d) in cuts:
        pieces = [
            Piece(token_ids=long[a:b], start=a, blocks=long_blocks),
            Piece(token_ids=short[c:d], start=c, blocks=short_blocks),
        ]
        paged = loaded.forward(pieces, [0, 1])
    for ours, theirs in zip(paged.float(), plain, strict=True):
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        if not difference < TRIAL_TOLERANCE[loaded.shape.dtype]:
            raise ModelFolderError(
                f"{spec.folder} is a {type(loaded.model).__name__}, whose logits with the paged cache differ by "
                f"{difference:.1e} of their size from those without: generate can't run it"
            )
