"""Loads a language model on torch, tries it out, and computes the logits of the next tokens.

Any decoder that uses transformers' attention interface works: the model keeps its own code except for attention, which
reads the paged cache (cache.py). At load, a trial text goes through the unchanged model and in pieces through the
cache, and the logits must agree.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch
from multigpu.config.values import from_text
from torch import Tensor

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.artifacts import Artifact
from multigpu_worker.engines.common.placed import placement
from multigpu_worker.engines.common.pretrained import loading, transformers
from multigpu_worker.engines.common.torch_runtime import dtype_of
from multigpu_worker.engines.generate.cache import (
    ATTENTION,
    BLOCK_TOKENS,
    CacheShape,
    PagedCache,
    Piece,
    blocks_for,
    make_step,
    running,
)
from multigpu_worker.engines.generate.json_schema import Matcher, Schemas
from multigpu_worker.engines.generate.ranks import Rank, RankGroup, check_ranks
from multigpu_worker.engines.generate.token_bytes import TokenBytes
from multigpu_worker.engines.generate.weights import dequantised, read_weights
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec

# Time for the end of another rank's process, once its connections have closed.
RANK_END_S = 1.0
# Context of models that name no limit.
CONTEXT_TOKENS = 2048
# Default limits of the cache: on a CPU (and at most a quarter of the host's memory); on a GPU, as a share of its free
# memory.
CPU_CACHE_BYTES = 512 << 20
GPU_CACHE_SHARE = 0.5
# Known parameters of model.toml.
PARAMETERS = ("cache_bytes", "context")
# Layer types whose state the cache holds.
LAYER_TYPES = {"full_attention", "sliding_attention"}
# Position encodings that change for all tokens of a step if one of them is past the model's original context.
CHANGING_ROPES = {"dynamic", "longrope"}

TRIAL_TEXT = "A trial: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen."
TRIAL_TOKENS = 24
# Largest difference of logits that rounding explains, relative to the largest logit.
TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 3e-2}

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class GenerateModel:
    model: Any
    tokenizer: Any
    device: torch.device
    shape: CacheShape
    eos_ids: frozenset[int]
    # Number of token ids that the model accepts. A tokenizer may have more.
    vocabulary: int
    # Most tokens of a sequence.
    context: int
    cache: PagedCache
    schemas: Schemas
    token_bytes: TokenBytes
    # The files of a dequantised model.
    artifact: Artifact | None = None
    # The other processes that share the model, if this is rank 0.
    group: RankGroup | None = None
    facts: dict[str, str] = field(default_factory=dict)

    def matcher(self, json_schema: str) -> Matcher:
        return self.schemas.matcher(json_schema)

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, without special tokens."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece], wanted: Sequence[int]) -> Tensor:
        """Logits after the last token of pieces: [len(wanted), vocabulary]. `wanted`: their indices, at least one."""
        if self.group is None:
            return self._forward(pieces, wanted)
        self.group.send(pieces, wanted)
        try:
            return self._forward(pieces, wanted)
        except Exception as error:
            # The step also fails if another rank has ended: then the thread that watches that rank ends this process.
            time.sleep(RANK_END_S)
            log.exception("a step of a model with several ranks has failed")
            self.group.end(f"rank 0: {error!r}")

    def _forward(self, pieces: Sequence[Piece], wanted: Sequence[int]) -> Tensor:
        token_ids, positions, step = make_step(self.cache, pieces, self.device)
        ends: list[int] = []
        for piece in pieces:
            ends.append((ends[-1] if ends else -1) + len(piece.token_ids))
        # No tensor: the last layer may be on another device.
        keep = [ends[index] for index in wanted]
        with running(step):
            answer = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=keep)
        logits: Tensor = answer.logits[0]
        return logits


def load_model(spec: ModelSpec, settings: EngineSettings, precision: str, rank: Rank | None = None) -> GenerateModel:
    """Load a model, or this rank's share of it, and run the trial.

    Raises ModelFolderError, MemoryError; ArtifactError while dequantising.
    """
    disable_progress_bar: Any = transformers.utils.logging.disable_progress_bar
    disable_progress_bar()
    if unknown := sorted(set(spec.parameters) - set(PARAMETERS)):
        raise ModelFolderError(f"model.toml has parameters.{unknown[0]}: generate knows {' and '.join(PARAMETERS)}")
    dtype = dtype_of(precision)
    placed = placement(spec, settings, precision) if rank is None else rank.from_pretrained()
    artifacts = settings.artifacts, settings.artifacts_bytes_max
    model, tokenizer, artifact = read_weights(spec, *artifacts, dtype, **placed)
    with loading(spec.folder, "AutoModelForCausalLM"):
        return _load(spec, settings, dtype, rank, model, tokenizer, artifact)


def load_shared_model(spec: ModelSpec, settings: EngineSettings, precision: str) -> GenerateModel:
    """Load a model together with other ranks, which are started. Raises as load_model.

    Call it on a thread that lives as long as the process.
    """
    check_ranks(spec)
    # Before there are ranks: transformers saves a model on rank 0 alone, while the others would read it.
    dequantised(spec, settings.artifacts, settings.artifacts_bytes_max, dtype_of(precision))
    group = RankGroup(spec, settings, precision)
    model = load_model(spec, settings, precision, group.own)
    model.group = group
    return model


def _load(
    spec: ModelSpec, settings: EngineSettings, dtype: torch.dtype, rank: Rank | None, model: Any, tokenizer: Any,
    artifact: Artifact | None,
) -> GenerateModel:  # fmt: skip
    config = model.config.get_text_config()
    _check_layers(spec, config)
    device = torch.device(settings.device) if rank is None else rank.device
    model = (model if spec.device_map or rank is not None else model.to(device)).eval()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = heads if rank is None else heads // rank.tensor_parallel
    layers = {
        module.layer_idx: _device_of(module, device) for module in model.modules() if hasattr(module, "layer_idx")
    }
    shape = CacheShape(layers=layers, heads=heads, head_size=head_size, dtype=dtype)
    eos_ids = _eos_ids(model, tokenizer)
    loaded = GenerateModel(
        model=model,
        tokenizer=tokenizer,
        device=device,
        shape=shape,
        eos_ids=eos_ids,
        vocabulary=int(config.vocab_size),
        context=_context(spec, config),
        cache=PagedCache(shape, 2 * blocks_for(TRIAL_TOKENS)),
        schemas=Schemas(tokenizer, eos_ids),
        token_bytes=TokenBytes(tokenizer),
        artifact=artifact,
    )
    _try_out(loaded, spec)
    blocks = _blocks(spec, settings, loaded, 1 if rank is None else rank.size)
    blocks = blocks if rank is None else rank.least(blocks)
    loaded.cache = PagedCache(shape, blocks)
    loaded.context = min(loaded.context, blocks * BLOCK_TOKENS)
    cache_mib = blocks * BLOCK_TOKENS * shape.token_bytes / (1 << 20)
    of_rank = "" if rank is None else f" on each of {rank.size} ranks"
    loaded.facts = {
        "context": f"{loaded.context} tokens",
        "cache": f"{blocks} blocks of {BLOCK_TOKENS} tokens, {cache_mib:.1f} MiB{of_rank}",
    }
    return loaded


def _device_of(layer: Any, default: torch.device) -> torch.device:
    """Where a layer computes. One whose weights are on the host or its disk does on the device of its hook."""
    hook = getattr(layer, "_hf_hook", None)
    found = getattr(hook, "execution_device", None)
    return default if found is None else torch.device(found)


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
        # Up to this context, a token's encoding does not depend on the rest of the step.
        limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    return min(int(limit), _number(spec, "context", int(limit)))


def _number(spec: ModelSpec, name: str, default: int) -> int:
    """A number from model.toml's parameters, at least 1. `cache_bytes` may have a unit."""
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


def _blocks(spec: ModelSpec, settings: EngineSettings, loaded: GenerateModel, ranks: int) -> int:
    """The number of blocks of the cache: enough for all slots at full context, or as many as its limit allows.

    Each of the ranks has its share of each block. `cache_bytes` is for all of them together.
    """
    if loaded.device.type == "cuda":
        bytes_max = min(
            int(torch.cuda.mem_get_info(device)[0] * GPU_CACHE_SHARE * loaded.shape.token_bytes / token_bytes)
            for device, token_bytes in loaded.shape.token_bytes_of.items()
        )
    else:
        host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        bytes_max = min(CPU_CACHE_BYTES, host_bytes // 4) // ranks
    bytes_max = _number(spec, "cache_bytes", bytes_max * ranks) // ranks
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
    """Compare the logits of two sequences, fed in pieces through the cache, with those of the unchanged model."""
    ids = [int(token) for token in loaded.tokenizer(TRIAL_TEXT)["input_ids"]][:TRIAL_TOKENS]
    ids += [ids[-1]] * (TRIAL_TOKENS - len(ids))
    long, short = ids, ids[5:16]
    expected = [
        loaded.model(input_ids=torch.tensor([each], device=loaded.device), use_cache=False).logits[0, -1].float()
        for each in (long, short)
    ]
    loaded.model.set_attn_implementation(ATTENTION)
    if loaded.model.config.get_text_config()._attn_implementation != ATTENTION:  # noqa: SLF001 (no public name)
        raise ModelFolderError(
            f"{spec.folder} is a {type(loaded.model).__name__}, which has its own attention: generate needs a model "
            "that uses transformers' attention interface"
        )
    # Blocks are out of order. Three steps: both pieces of several tokens; several and a single one; two single ones.
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
    for ours, theirs in zip(paged.float(), expected, strict=True):
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        if not difference < TRIAL_TOLERANCE[loaded.shape.dtype]:
            raise ModelFolderError(
                f"{spec.folder} is a {type(loaded.model).__name__}, whose logits with the paged cache differ by "
                f"{difference:.1e} of their size from those without: generate can't run it"
            )
