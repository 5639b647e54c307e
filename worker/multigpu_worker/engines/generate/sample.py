"""Sampling of the next token: greedy or random.

In the order of transformers: repetition penalty, temperature, top k, top p. Random numbers are a hash of seed and
position instead of a stateful generator: so an attempt that continues another one draws the same tokens, whatever else
is in the batch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. `seed` is used if `temperature` is not 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    # 0: all.
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0


def uniform(seed: int, position: int) -> float:
    """A pseudorandom number in [0, 1), the same on every host."""
    data = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) / (1 << 53)


def choose(logits: Tensor, samplings: Sequence[Sampling], histories: Sequence[Sequence[int]]) -> list[int | None]:
    """The next token of each sequence. None: its logits are not finite.

    logits [sequences, vocabulary]; a history is all of a sequence's tokens, with the prompt. One copy from the device.
    """
    logits = logits.float()
    penalties = [row for row, sampling in enumerate(samplings) if sampling.repetition_penalty != 1.0]
    seen = [sorted(set(histories[row])) for row in penalties]
    ids = torch.tensor([token for tokens in seen for token in tokens], dtype=torch.int64, device=logits.device)
    for row, tokens in zip(penalties, torch.split(ids, [len(tokens) for tokens in seen]), strict=True):
        logits[row] = penalised(logits[row], tokens, samplings[row].repetition_penalty)
    values, chosen = torch.max(logits, dim=-1)
    for row, (sampling, history) in enumerate(zip(samplings, histories, strict=True)):
        if sampling.temperature > 0:
            chosen[row] = draw(logits[row], sampling, len(history))
    tokens, sound = torch.stack((chosen, values.isfinite())).tolist()
    return [token if is_sound else None for token, is_sound in zip(tokens, sound, strict=True)]


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Apply the repetition penalty to the tokens `seen`, as transformers' RepetitionPenaltyLogitsProcessor does."""
    scores = logits[seen]
    return logits.index_copy(0, seen, torch.where(scores < 0, scores * penalty, scores / penalty))


def draw(logits: Tensor, sampling: Sampling, position: int) -> Tensor:
    """Draw one token by inverting the cumulative distribution, likeliest first. logits [vocabulary].

    The token stays on the device, so nothing waits for it. For logits that are not finite it is arbitrary.
    """
    # Minus the largest, because division by a very small temperature would overflow.
    scores, order = torch.sort((logits - logits.max()) / sampling.temperature, descending=True, stable=True)
    if sampling.top_k:
        scores = scores[: sampling.top_k]
    # In float64: thousands of small numbers are added.
    sums = torch.softmax(scores.double(), dim=-1).cumsum(dim=-1)
    last = torch.full((1,), len(sums) - 1, device=logits.device)
    if sampling.top_p < 1:
        # The token that crosses the bound is included.
        bound = torch.full((1,), sampling.top_p, dtype=sums.dtype, device=logits.device)
        last = last.minimum(torch.searchsorted(sums, bound))
    target = uniform(sampling.seed, position) * sums.index_select(0, last)
    at = torch.searchsorted(sums, target, right=True).minimum(last)
    return order.index_select(0, at)[0]
