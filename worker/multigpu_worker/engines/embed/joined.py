"""Runs texts through a transformer joined end to end, as one row without padding.

In an encoder, only attention relates tokens to each other; all other layers compute each token separately. So a
micro-batch becomes one row of tokens with the positions of each text, and attention is computed text by text (texts of
equal length in one call). The cost is that of the tokens, without padding.

That needs transformers' common attention function, with a mask that only hides padding. Other models fail on an
argument of attention or in a trial at load, and get padded texts.
"""

import inspect
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from multigpu_worker.engines.common.pretrained import transformers

ATTENTION = "multigpu_joined"
# Arguments of attention that do not change its result here.
HARMLESS = frozenset({"dropout", "is_causal", "output_attentions", "position_ids", "token_type_ids", "use_cache"})

# Consecutive texts of equal length: first token, number of texts, length.
Spans = list[tuple[int, int, int]]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    joined_spans: Spans,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention [1, tokens, heads, width] of query, key and value [1, heads, tokens, width], text by text."""
    unknown = [name for name, value in others.items() if value is not None and name not in HARMLESS]
    if unknown or attention_mask is not None or getattr(module, "is_causal", False) or others.get("is_causal"):
        raise NotImplementedError(f"this model's attention has {', '.join(unknown) or 'a mask'}")
    found = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    for first, texts, length in joined_spans:
        span = slice(first, first + texts * length)
        # [1, heads, tokens, width] to [texts, heads, length, width].
        q, k, v = (x[0, :, span].reshape(-1, texts, length, x.shape[3]).transpose(0, 1) for x in (query, key, value))
        vectors = scaled_dot_product_attention(q, k, v, scale=scaling)
        found[span] = vectors.transpose(1, 2).flatten(0, 1)
    return found.unsqueeze(0), None


def no_mask(*, mask_function: Any, **others: Any) -> None:
    """No mask. Raises NotImplementedError for a sliding window or a causal mask."""
    del others
    if mask_function is not transformers.masking_utils.bidirectional_mask_function:
        raise NotImplementedError("this model's attention is not from each token to all others")


def forward(transformer: nn.Module, first_position: int, inputs: Mapping[str, Tensor | None]) -> Tensor:
    """Token vectors [rows, width, hidden] of inputs [rows, width] padded on the right; 0 in the padding.

    `first_position`: of each text, as `join` found it.
    """
    mask = inputs["attention_mask"]
    assert mask is not None
    real = mask.bool()
    every = {**inputs, "position_ids": mask.cumsum(dim=1) - 1 + first_position, "attention_mask": None}
    row = {name: values[real].unsqueeze(0) for name, values in every.items() if values is not None}
    tokens = transformer(**row, joined_spans=list(_spans(mask.sum(dim=1).tolist())))[0]
    padded: Tensor = tokens.new_zeros(*real.shape, tokens.shape[-1])
    padded[real] = tokens[0]
    return padded


def _spans(lengths: list[int]) -> Iterator[tuple[int, int, int]]:
    first = 0
    for length, group in groupby(lengths):
        texts = len(list(group))
        if length:
            yield first, texts, length
        first += texts * length


@torch.inference_mode()
def join(transformer: Any, trial: Mapping[str, Tensor], tolerance: float) -> int | None:
    """Set a transformer up for joined texts, and return the first position of a text. None: not possible.

    `trial`: padded inputs of texts of different lengths, which have to give the same token vectors both ways.
    """
    if "position_ids" not in inspect.signature(transformer.forward).parameters:
        return None
    transformers.AttentionInterface.register(ATTENTION, attention)
    transformers.AttentionMaskInterface.register(ATTENTION, no_mask)
    real = trial["attention_mask"].bool()
    before = transformer(**trial)[0][real]
    usual = transformer.config._attn_implementation  # noqa: SLF001 (no public name)
    # Not set_attn_implementation, which logs a warning for models without that choice.
    transformer.config._attn_implementation = ATTENTION  # noqa: SLF001 (as above)
    try:
        # RoBERTa and related models start at the position after the padding token's.
        for first_position in (0, (transformer.config.pad_token_id or 0) + 1):
            joined = forward(transformer, first_position, trial)[real]
            if ((joined - before).abs().max() / before.abs().max()).item() < tolerance:
                return first_position
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        pass  # the model does not support joined texts
    transformer.config._attn_implementation = usual  # noqa: SLF001 (as above)
    return None
