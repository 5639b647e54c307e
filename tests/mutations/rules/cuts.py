"""How the texts of a batch are cut into micro-batches, for models that compute padding and for those that don't.

Each text is in one micro-batch, none is larger than the model's limit unless it is one text, no two that follow each
other would have fit into one, and padding is computed only by a model that can't do without.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from multigpu_worker.engines.embed.backend import Vectors
from multigpu_worker.engines.embed.engine import MicroBatch, cut
from multigpu_worker.engines.embed.text import Inputs, TextInput, Tokens


class Words(TextInput):
    """A token for each letter."""

    def tokenise(self, texts: Sequence[str]) -> Tokens:
        return Tokens(columns={"input_ids": [[1] * len(text) for text in texts]})


@dataclass(slots=True, kw_only=True)
class Model:
    """An EmbedBackend that is never asked for vectors."""

    text: TextInput
    tokens_max: int
    pads: bool
    dimension: int = 4
    identity: str = ""

    def embed(self, inputs: Inputs) -> Vectors:
        raise NotImplementedError


def check(seed: int) -> None:
    """AssertionError: a rule is broken."""
    rng = random.Random(seed)
    text = Words(tokenizer=None, is_fast=True, tokens_per_text_max=64, prompt="", inputs={"input_ids": 0})
    model = Model(text=text, tokens_max=rng.choice((1, 40, 300)), pads=rng.random() < 0.5)
    texts = ["x" * rng.randint(1, 64) for _ in range(rng.choice((1, 2, 30, 200)))]
    micro_batches = cut(model, texts, np.arange(len(texts)))
    places = [int(place) for micro_batch in micro_batches for place in micro_batch.places]
    assert sorted(places) == list(range(len(texts))), "a text is not in one micro-batch"
    for micro_batch in micro_batches:
        lengths = [len(texts[place]) for place in micro_batch.places]
        computed = max(lengths) * len(lengths) if model.pads else sum(lengths)
        assert micro_batch.tokens == computed, "the tokens that are computed are counted wrong"
        assert computed <= model.tokens_max or len(lengths) == 1, "a micro-batch is too large"
        check_half(micro_batch)
    for one, other in pairwise(micro_batches):
        assert len(texts[one.places[-1]]) >= len(texts[other.places[0]]), "texts are not sorted by length"
        first = len(texts[other.places[0]])
        more = len(texts[one.places[0]]) if model.pads else first
        assert one.tokens + more > model.tokens_max, "a forward pass more than it takes"


def check_half(micro_batch: MicroBatch) -> None:
    """What is left of a micro-batch counts its tokens in the same way."""
    rows: npt.NDArray[np.bool_] = np.arange(len(micro_batch.places)) % 2 == 0
    half = micro_batch.select(rows)
    lengths = micro_batch.inputs["attention_mask"][rows].sum(axis=1)
    computed = lengths.max() * len(lengths) if micro_batch.pads else lengths.sum()
    assert half.tokens == computed, "the tokens of a part are counted wrong"
