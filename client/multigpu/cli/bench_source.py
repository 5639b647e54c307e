"""What `mgpuctl bench` sends: texts, of which each round has its own, or arrays, repeated as often as a batch is large.

Each round has texts that no earlier one had, as long as there are enough: what a cache of vectors knows is no figure.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from multigpu import embedding, inference
from multigpu.cli.bench_plain import Examples
from multigpu.cli.failures import Failure
from multigpu.cli.lines import read_lines
from multigpu.sentences import sentences
from multigpu.v1 import embed_pb2

# The texts that a variant is warmed up and judged with.
JUDGED_TEXTS = 64
# Pairs a line: the score that people gave, and two texts.
PAIR_FIELDS = 3

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """The same examples for the fleet and for the plain loop."""

    # Payload, and examples in it.
    payloads: list[tuple[bytes, int]]
    examples: Examples
    # How often the plain loop must run them to have done as much.
    items: int


class Source(Protocol):
    kind: str

    def portion(self, items: int, batch_size: int) -> Portion:
        """For another round, of about so many items."""

    def judged(self) -> Portion:
        """The same ones each time."""

    def rows(self, results: Sequence[bytes]) -> Rows:
        """The answers, a row for each example."""


class Texts:
    kind = embedding.KIND

    def __init__(self, texts: Sequence[str]) -> None:
        self._judged = texts[:JUDGED_TEXTS]
        self._endless: Iterator[str] = itertools.cycle(texts[JUDGED_TEXTS:] or texts)

    @classmethod
    def of(cls, file: str | None, wanted: int) -> "Texts":
        """Of a file, or the built-in ones. Raises Failure."""
        texts = [text for text in read_lines([file]) if text.strip()] if file else sentences(JUDGED_TEXTS + wanted)
        if not texts:
            raise Failure(f"{file} has no texts: one a line")
        return cls(texts)

    def portion(self, items: int, batch_size: int) -> Portion:
        return self._portion(list(itertools.islice(self._endless, items)), batch_size)

    def judged(self) -> Portion:
        return self._portion(list(self._judged), embedding.CHUNK_TEXTS)

    @staticmethod
    def _portion(texts: list[str], batch_size: int) -> Portion:
        parts = [texts[at : at + batch_size] for at in range(0, len(texts), batch_size)]
        payloads = [(embed_pb2.EmbedPayload(texts=part).SerializeToString(), len(part)) for part in parts]
        return Portion(payloads=payloads, examples=Examples(texts), items=len(texts))

    def rows(self, results: Sequence[bytes]) -> Rows:
        parsed = [embed_pb2.EmbedResult.FromString(result) for result in results]
        return np.concatenate([np.frombuffer(found.values, "<f4").reshape(-1, found.dimension) for found in parsed])


class Arrays:
    kind = inference.KIND

    def __init__(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        lengths = {len(array) if array.ndim else 0 for array in inputs.values()}
        if len(lengths) != 1 or 0 in lengths:
            raise Failure("all inputs must have one first dimension, which counts the examples, and at least one")
        self._inputs = inputs

    def portion(self, items: int, batch_size: int) -> Portion:
        batch = {name: np.resize(array, (batch_size, *array.shape[1:])) for name, array in self._inputs.items()}
        payload, _ = inference.input_of(batch, ())
        tasks = max(1, items // batch_size)
        return Portion(
            payloads=[(payload, batch_size)] * tasks,
            examples=Examples([], batch, tasks),
            items=tasks * batch_size,
        )

    def judged(self) -> Portion:
        payload, count = inference.input_of(self._inputs, ())
        return Portion(payloads=[(payload, count)], examples=Examples([], self._inputs), items=count)

    def rows(self, results: Sequence[bytes]) -> Rows:
        rows = []
        for result in results:
            outputs = inference.arrays_of(result)
            flat = [np.asarray(outputs[name], np.float32) for name in sorted(outputs)]
            rows.append(np.concatenate([array.reshape(len(array), -1) for array in flat], axis=1))
        return np.concatenate(rows)


def read_pairs(file: str) -> tuple[NDArray[Any], list[str], list[str]]:
    """Scores and the two texts of each: lines of score, tab, text, tab, text. Raises Failure."""
    scores, firsts, seconds = [], [], []
    for number, line in enumerate(read_lines([file]), 1):
        fields = line.split("\t")
        try:
            score, first, second = fields
            scores.append(float(score))
        except ValueError as error:
            raise Failure(f"{Path(file).name}, line {number}: not score, tab, text, tab, text") from error
        firsts.append(first)
        seconds.append(second)
    if len(scores) < PAIR_FIELDS:
        raise Failure(f"{file} has {len(scores)} pairs: too few for a correlation")
    return np.array(scores), firsts, seconds
