"""Sampling of the next token: greedy or random.

In the order of transformers: repetition penalty, temperature, top k, top p. The mask of a JSON schema comes before
them, and log probabilities are those of the unchanged logits. Random numbers are a hash of seed and position instead of
a stateful generator: so an attempt that continues another one draws the same tokens, whatever else is in the batch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from multigpu_worker.engines.generate.json_schema import Masks


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. `seed` is used if `temperature` is not 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    # 0: all.
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    # Number of likeliest tokens to report with each token. None: report no log probabilities.
    logprobs: int | None = None


class Choice(NamedTuple):
    """The next token of a sequence."""

    token: int
    # The token and its log probability, and then those of the likeliest tokens. Empty: not requested.
    logprobs: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, position: int) -> float:
    """A pseudorandom number in [0, 1), the same on every host."""
    data = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) / (1 << 53)


def sample_tokens(
    logits: Tensor, samplings: Sequence[Sampling], histories: Sequence[Sequence[int]], masks: Masks | None = None
) -> list[Choice | None]:
    """The next token of each sequence. None: its logits are not finite.

    logits [sequences, vocabulary]; a history is all of a sequence's tokens, with the prompt. Waits for
    the device once.
    """
    logits = logits.float()
    reporting = [row for row, sampling in enumerate(samplings) if sampling.logprobs is not None]
    # A copy, because the steps below change the logits.
    logprobs = torch.log_softmax(logits[reporting], dim=-1) if reporting else None
    if masks is not None:
        masks.apply(logits)
    penalties = [row for row, sampling in enumerate(samplings) if sampling.repetition_penalty != 1.0]
    seen = [sorted(set(histories[row])) for row in penalties]
    ids = torch.tensor([token for tokens in seen for token in tokens], dtype=torch.int64, device=logits.device)
    for row, tokens in zip(penalties, torch.split(ids, [len(tokens) for tokens in seen]), strict=True):
        logits[row] = penalised(logits[row], tokens, samplings[row].repetition_penalty)
    values, chosen = torch.max(logits, dim=-1)
    for row, (sampling, history) in enumerate(zip(samplings, histories, strict=True)):
        if sampling.temperature > 0:
            chosen[row] = draw(logits[row], sampling, len(history))
    flat = [chosen, values.isfinite()]
    if logprobs is None:
        tokens, finite = torch.stack(flat).tolist()
        return [Choice(token) if is_finite else None for token, is_finite in zip(tokens, finite, strict=True)]
    rows = torch.tensor(reporting, device=logits.device)
    count = min(max(samplings[row].logprobs or 0 for row in reporting), logits.shape[1])
    likeliest = torch.topk(logprobs, count, dim=-1).indices
    ids = torch.cat((chosen.index_select(0, rows).unsqueeze(1), likeliest), dim=1)
    flat += [ids.flatten(), logprobs.gather(1, ids).flatten()]
    return _choices(torch.cat([each.double() for each in flat]).tolist(), samplings, reporting)


def _choices(flat: list[float], samplings: Sequence[Sampling], reporting: list[int]) -> list[Choice | None]:
    """Parse what was copied from the device. float64 holds token ids and float32 exactly.

    For each row its token, and whether it is finite; for each reporting row the ids of its token and of the likeliest
    ones; for each of these ids its log probability.
    """
    rows = len(samplings)
    tokens, finite, rest = flat[:rows], flat[rows : 2 * rows], flat[2 * rows :]
    choices = [Choice(int(token)) if is_finite else None for token, is_finite in zip(tokens, finite, strict=True)]
    pairs = [(int(token), value) for token, value in zip(rest[: len(rest) // 2], rest[len(rest) // 2 :], strict=True)]
    width = len(pairs) // len(reporting)
    for at, row in enumerate(reporting):
        choice, its = choices[row], pairs[at * width : (at + 1) * width]
        if choice is not None:
            choices[row] = Choice(choice.token, tuple(its[: 1 + (samplings[row].logprobs or 0)]))
    return choices


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
