"""The paged cache of keys and values, and the attention that reads it.

Each layer has one flat row of places, one per token, divided into blocks of BLOCK_TOKENS. A sequence has a list of
blocks in the order of its tokens, anywhere in the row: nothing is reserved for future tokens, and nothing is moved.
`BlockPool` keeps track of free blocks, `PagedCache` holds the memory.

The tokens of a step are packed: pieces of several sequences in one row, so the model's linear layers see one large
matrix. transformers calls a registered attention function, which stores the new keys and values, and lets each piece
see the tokens of its sequence, as the current `Step` says. Pieces of one token, which running
sequences have, are computed together, padded to the longest; longer pieces one by one.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

BLOCK_TOKENS = 16
ATTENTION = "multigpu_paged"


class BlockPool:
    """Keeps track of free blocks. At most `blocks_max` are in use; it may be lowered at any time."""

    def __init__(self, blocks: int) -> None:
        self.blocks_max = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self.used = 0

    def can_take(self, count: int) -> bool:
        return self.used + count <= self.blocks_max

    def take(self, count: int) -> list[int]:
        assert self.can_take(count)
        self.used += count
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self.used -= len(blocks)
        self._free.extend(reversed(blocks))


def blocks_for(tokens: int) -> int:
    """The number of blocks for these tokens."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What this process stores for each token: of its own layers and heads, if several ranks share the model."""

    # The device of each, by its number in the model.
    layers: Mapping[int, torch.device]
    heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return sum(self.token_bytes_of.values())

    @property
    def token_bytes_of(self) -> dict[torch.device, int]:
        """By device."""
        layer_bytes = 2 * self.heads * self.head_size * self.dtype.itemsize
        return {device: count * layer_bytes for device, count in Counter(self.layers.values()).items()}


class PagedCache:
    """The memory of all blocks. Raises torch's RuntimeError if there is not enough."""

    def __init__(self, shape: CacheShape, blocks: int) -> None:
        self.blocks = blocks
        size = (blocks * BLOCK_TOKENS, shape.heads, shape.head_size)
        # Not cleared: the host's pages without tokens take no memory.
        devices = shape.layers.items()
        self.keys = {layer: torch.empty(size, dtype=shape.dtype, device=device) for layer, device in devices}
        self.values = {layer: torch.empty(size, dtype=shape.dtype, device=device) for layer, device in devices}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens of one sequence that go through the model in one step."""

    token_ids: list[int]
    # Position of the first token in its sequence.
    start: int
    # The blocks of the sequence, including these tokens.
    blocks: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(slots=True)
class Group:
    """Pieces whose attention is computed together: all of one token, or a single longer one."""

    # Indices of the tokens in the row: [pieces * queries].
    rows: Tensor
    queries: int
    # Places of the sequences' keys, padded with each sequence's first: [pieces, keys].
    places: Tensor
    # Which keys each query sees: [pieces, 1, queries, keys]. None: all.
    mask: Tensor | None
    # Position of each query minus position of each key, for sliding windows: [pieces, queries, keys].
    distance: Tensor

    def on(self, device: torch.device) -> "Group":
        mask = None if self.mask is None else self.mask.to(device)
        return Group(self.rows.to(device), self.queries, self.places.to(device), mask, self.distance.to(device))


@dataclass(slots=True)
class Step:
    """What attention needs to know about the tokens of a step."""

    cache: PagedCache
    # Places of the new keys and values: [tokens].
    places: Tensor
    groups: list[Group]
    # Masks of each group for layers with a sliding window, by its size.
    _windows: dict[int, list[Tensor]] = field(default_factory=dict)
    _on: dict[torch.device, "Step"] = field(default_factory=dict)

    def on(self, device: torch.device) -> "Step":
        """The same step for a layer on this device. Its tensors are copied there once."""
        if device == self.places.device:
            return self
        if device not in self._on:
            self._on[device] = Step(self.cache, self.places.to(device), [group.on(device) for group in self.groups])
        return self._on[device]

    def masks(self, window: int | None) -> Sequence[Tensor | None]:
        if window is None:
            return [group.mask for group in self.groups]
        if window not in self._windows:
            self._windows[window] = [
                ((group.distance >= 0) & (group.distance < window)).unsqueeze(1) for group in self.groups
            ]
        return self._windows[window]


# Not a keyword of the model's forward: pipelines of transformers pass none on.
_current: ContextVar[Step] = ContextVar("step")


@contextlib.contextmanager
def running(step: Step) -> Iterator[None]:
    """Attention that is called meanwhile reads and writes the cache of this step."""
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


def make_step(cache: PagedCache, pieces: Sequence[Piece], device: torch.device) -> tuple[Tensor, Tensor, Step]:
    """The token ids and positions of a step, both [1, tokens], and its Step."""
    firsts = [0]
    for piece in pieces:
        firsts.append(firsts[-1] + len(piece.token_ids))
    token_ids = torch.tensor([[token for piece in pieces for token in piece.token_ids]])
    positions = torch.tensor([[at for piece in pieces for at in range(piece.start, piece.end)]])
    tables = [_places_of(piece) for piece in pieces]
    places = torch.cat([table[piece.start :] for piece, table in zip(pieces, tables, strict=True)])
    single = [index for index, piece in enumerate(pieces) if len(piece.token_ids) == 1]
    groups = [_group([index], pieces, tables, firsts) for index in range(len(pieces)) if index not in set(single)]
    if single:
        groups.insert(0, _group(single, pieces, tables, firsts))
    step = Step(cache, places.to(device), [group.on(device) for group in groups])
    return token_ids.to(device), positions.to(device), step


def _places_of(piece: Piece) -> Tensor:
    """The places of a sequence's tokens up to the end of the piece."""
    blocks = torch.tensor(piece.blocks[: blocks_for(piece.end)])
    return (blocks.unsqueeze(1) * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()[: piece.end]


def _group(indices: list[int], pieces: Sequence[Piece], tables: list[Tensor], firsts: list[int]) -> Group:
    queries = len(pieces[indices[0]].token_ids)
    keys = max(len(tables[index]) for index in indices)
    # Padded with a place that was written: unwritten memory may hold NaN, which stays NaN when it is masked.
    places = torch.stack([tables[index][:1].expand(keys) for index in indices]).clone()
    for row, index in enumerate(indices):
        places[row, : len(tables[index])] = tables[index]
    starts = torch.tensor([[pieces[index].start] for index in indices])
    # Negative: the key comes after the query, or is padding.
    distance = (starts + torch.arange(queries)).unsqueeze(2) - torch.arange(keys)
    seen = distance >= 0
    rows = torch.cat([torch.arange(firsts[index], firsts[index + 1]) for index in indices])
    mask = None if bool(seen.all()) else seen.unsqueeze(1)
    return Group(rows, queries, places, mask, distance)


def prompt_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None, *, copied: bool
) -> Tensor:
    """Attention where several query heads may share a key head. All [pieces, heads, tokens, size].

    `copied`: copy keys and values for each query head. CUDA's fast kernels support grouped heads only without a mask,
    and prompts have one; the fallback kernel would write all scores to memory. The CPU kernel supports both.
    """
    heads, key_heads = queries.shape[1], keys.shape[1]
    if copied and heads != key_heads:
        keys, values = (each.repeat_interleave(heads // key_heads, dim=1) for each in (keys, values))
    grouped = heads != keys.shape[1]
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scaling, enable_gqa=grouped)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (of transformers' signature; ours is in the current step)
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention over the cache. query [1, heads, tokens, size], key and value [1, key heads, tokens, size]."""
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("its attention has soft caps or sinks, which are not supported")
    paged = _current.get().on(query.device)
    keys, values = paged.cache.keys[module.layer_idx], paged.cache.values[module.layer_idx]
    keys.index_copy_(0, paged.places, key[0].transpose(0, 1))
    values.index_copy_(0, paged.places, value[0].transpose(0, 1))
    heads, key_heads, size = query.shape[1], keys.shape[1], query.shape[3]
    answer = torch.empty((query.shape[2], heads, value.shape[3]), dtype=query.dtype, device=query.device)
    by_token = query[0].transpose(0, 1)
    for group, mask in zip(paged.groups, paged.masks(sliding_window), strict=True):
        pieces, key_count = group.places.shape
        # index_select is several times as fast on a CPU as keys[places].
        places = group.places.flatten()
        its_keys = keys.index_select(0, places).view(pieces, key_count, key_heads, -1).transpose(1, 2)
        its_values = values.index_select(0, places).view(pieces, key_count, key_heads, -1).transpose(1, 2)
        queries = by_token.index_select(0, group.rows)
        if group.queries == 1:
            # Query heads that share a key head become queries of that head, so its keys need not be copied.
            queries = queries.view(pieces, key_heads, heads // key_heads, size)
            attended = scaled_dot_product_attention(queries, its_keys, its_values, attn_mask=mask, scale=scaling)
        else:
            queries = queries.view(pieces, group.queries, heads, size).transpose(1, 2)
            copied = query.device.type == "cuda"
            attended = prompt_attention(queries, its_keys, its_values, mask, scaling, copied=copied).transpose(1, 2)
        answer.index_copy_(0, group.rows, attended.reshape(pieces * group.queries, heads, -1))
    return answer.unsqueeze(0), None


AttentionInterface.register(ATTENTION, paged_attention)
