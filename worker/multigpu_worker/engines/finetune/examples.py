"""Texts as examples to train with."""

import random
from collections.abc import Sequence
from typing import Any

import torch

Example = dict[str, list[int]]
# The label of tokens that don't count: torch's cross entropy ignores it.
IGNORED = -100
# Of texts, tokenized at a time.
CHUNK = 1000


def split(texts: Sequence[str], fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """The texts to train with, and those held out for evaluation."""
    order = list(texts)
    random.Random(seed).shuffle(order)  # noqa: S311  no secret
    held_out = round(len(order) * fraction)
    return order[held_out:], order[:held_out]


def examples_of(texts: Sequence[str], tokenizer: Any, length: int) -> list[Example]:
    """Each text with an end token, cut into pieces of at most `length` tokens."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    found: list[Example] = []
    for begin in range(0, len(texts), CHUNK):
        for token_ids in tokenizer(list(texts[begin : begin + CHUNK]), verbose=False)["input_ids"]:
            whole = [*token_ids, *end]
            pieces = [whole[at : at + length] for at in range(0, len(whole), length)]
            # A single token predicts nothing.
            found += [{"input_ids": piece} for piece in pieces if len(piece) > 1]
    return found


def collate(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """A batch, padded to its longest example: int64 [examples, tokens]."""
    longest = max(len(each["input_ids"]) for each in examples)

    def padded(value: int, fill: int | None = None) -> torch.Tensor:
        rows = [each["input_ids"] if fill is None else [fill] * len(each["input_ids"]) for each in examples]
        return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])

    return {"input_ids": padded(0), "labels": padded(IGNORED), "attention_mask": padded(0, 1)}
