"""What a model takes on a device besides its weights: keys and values, and the intermediate results of a step."""

from dataclasses import dataclass
from typing import Any

from multigpu_worker.repository.model import ModelSpec

# Tokens of a step: of generate (engines/generate/scheduler.py), and of a batch of other kinds (configuration.md).
STEP_TOKENS = {"generate": 2048}
BATCH_TOKENS = 16384
GPU_PROCESS_BYTES = 500 << 20  # a CUDA context with the libraries' workspaces, a guess
CONTEXT_TOKENS = 2048  # of models that name no limit, as in generate
SEQUENCES = 8  # that generate has logits of in a step


@dataclass(slots=True, kw_only=True)
class Costs:
    """Of one model at one precision, in bytes."""

    cache_tokens: int = 0
    layer_cache_bytes: int = 0  # of one layer, for these tokens
    activation_bytes: int = 0
    hidden_bytes: int = 0  # of a token between two layers


def costs_of(spec: ModelSpec, config: Any, number_bytes: int, cache_tokens: int | None) -> Costs:
    """`config`: of the text model. `cache_tokens` None: one sequence of the longest context. The costs of a model
    without attention are unknown, and 0.
    """
    hidden = getattr(config, "hidden_size", None)
    if not isinstance(hidden, int) or not hasattr(config, "num_attention_heads"):
        return Costs()
    heads, kv_heads, head_size = heads_of(config)
    experts = int(getattr(config, "num_experts_per_tok", None) or 1)
    inner = getattr(config, "moe_intermediate_size", None) if experts > 1 else None
    inner = int(inner or getattr(config, "intermediate_size", None) or 4 * hidden) * experts
    # Of a layer: its input, output and two more of this width; queries, keys, values and what attention makes of them,
    # or the two products of the feed-forward network and what they make.
    numbers = 4 * hidden + max(2 * (heads + kv_heads) * head_size, 3 * inner)
    costs = Costs(hidden_bytes=hidden * number_bytes)
    costs.activation_bytes = STEP_TOKENS.get(spec.kind, BATCH_TOKENS) * numbers * number_bytes
    if spec.kind == "generate":
        context = int(getattr(config, "max_position_embeddings", None) or CONTEXT_TOKENS)
        if spec.parameters.get("context", "").isdecimal():
            context = min(context, int(spec.parameters["context"]))
        costs.cache_tokens = context if cache_tokens is None else cache_tokens
        costs.layer_cache_bytes = 2 * kv_heads * head_size * number_bytes * costs.cache_tokens
        costs.activation_bytes += SEQUENCES * config.vocab_size * (number_bytes + 4)
    return costs


def heads_of(config: Any) -> tuple[int, int, int]:
    """Attention heads, those of keys and values, and the size of a head."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return heads, kv_heads, int(getattr(config, "head_dim", None) or config.hidden_size // heads)
