"""The examples of `mgpuctl bench`: texts, arrays, or a handler's inputs.

Each round has new texts, as long as there are enough: an embedding cache must not answer them.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from multigpu._kinds import classification, embedding, inference
from multigpu.cli.bench.sentences import sentences
from multigpu.cli.failures import Failure
from multigpu.cli.tasks.lines import open_input, read_lines
from multigpu.v1 import classify_pb2, embed_pb2

# Examples that warm a variant up and whose answers are compared.
JUDGED_EXAMPLES = 64
# Fewer pairs have no meaningful correlation.
PAIRS_MIN = 3

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """The same tasks for the fleet and for the baseline."""

    payloads: list[bytes]
    # Examples in each.
    sizes: list[int]
    # All payloads are run this often.
    times: int = 1

    @property
    def items(self) -> int:
        return sum(self.sizes) * self.times


class Texts:
    kind = embedding.KIND
    # Of all payloads: empty for raw bytes, "application/json" for JSON values.
    content_type = ""

    def __init__(self, texts: Sequence[str]) -> None:
        self._judged = texts[:JUDGED_EXAMPLES]
        self._endless: Iterator[str] = itertools.cycle(texts[JUDGED_EXAMPLES:] or texts)

    def portion(self, items: int, batch_size: int) -> Portion:
        """The next round, of about this many items."""
        return self._portion(list(itertools.islice(self._endless, items)), batch_size)

    def judged(self) -> Portion:
        return self._portion(list(self._judged), embedding.CHUNK_TEXTS)

    @staticmethod
    def _portion(texts: list[str], batch_size: int) -> Portion:
        parts = [texts[at : at + batch_size] for at in range(0, len(texts), batch_size)]
        payloads = [embed_pb2.EmbedPayload(texts=part).SerializeToString() for part in parts]
        return Portion(payloads=payloads, sizes=[len(part) for part in parts])

    def rows(self, results: Sequence[bytes]) -> Rows:
        try:
            parsed = [embed_pb2.EmbedResult.FromString(result) for result in results]
            return np.concatenate([np.frombuffer(found.values, "<f4").reshape(-1, found.dimension) for found in parsed])
        except (DecodeError, ValueError) as error:
            raise Failure(f"can't read a result of embed ({error}): its worker has another version") from error


class Arrays:
    kind = inference.KIND
    content_type = ""

    def __init__(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        lengths = {len(array) if array.ndim else 0 for array in inputs.values()}
        if len(lengths) != 1 or 0 in lengths:
            raise Failure(
                "all inputs must have the same first dimension, the number of examples, and at least one example"
            )
        self._inputs = inputs

    def portion(self, items: int, batch_size: int) -> Portion:
        batch = {name: np.resize(array, (batch_size, *array.shape[1:])) for name, array in self._inputs.items()}
        payload, _ = inference.input_of(batch, ())
        return Portion(payloads=[payload], sizes=[batch_size], times=max(1, items // batch_size))

    def judged(self) -> Portion:
        payload, count = inference.input_of(self._inputs, ())
        return Portion(payloads=[payload], sizes=[count])

    def rows(self, results: Sequence[bytes]) -> Rows:
        (result,) = results
        outputs = inference.arrays_of(result)
        flat = [np.asarray(outputs[name], np.float32) for name in sorted(outputs)]
        counts = {array.shape[:1] for array in flat}
        # Outputs without a dimension for the examples are one answer to all of them.
        count = counts.pop()[0] if len(counts) == 1 and () not in counts else 1
        return np.concatenate([array.reshape(count, -1) for array in flat], axis=1)


class Singles:
    """One example in each task: to classify, or for a handler."""

    def __init__(self, kind: str, payloads: Sequence[bytes], content_type: str = "") -> None:
        self.kind, self.content_type = kind, content_type
        self._judged = payloads[:JUDGED_EXAMPLES]
        self._endless: Iterator[bytes] = itertools.cycle(payloads)

    @classmethod
    def to_classify(cls, subjects: Sequence[classification.Subject]) -> "Singles":
        return cls(classification.KIND, [classification.payload_of(each, classification.TOP_K) for each in subjects])

    def portion(self, items: int, batch_size: int) -> Portion:
        assert batch_size == 1
        return Portion(payloads=list(itertools.islice(self._endless, items)), sizes=[1] * items)

    def judged(self) -> Portion:
        payloads = list(self._judged)
        if self.kind == classification.KIND:
            # All classes are compared.
            parsed = [classify_pb2.ClassifyPayload.FromString(payload) for payload in payloads]
            for each in parsed:
                each.top_k = classification.TOP_K_MAX
            payloads = [each.SerializeToString() for each in parsed]
        return Portion(payloads=payloads, sizes=[1] * len(payloads))

    def rows(self, results: Sequence[bytes]) -> Rows | None:
        if self.kind != classification.KIND:
            return None
        found = [classification.labels_of(result) for result in results]
        rows = np.zeros((len(found), 1 + max(label.index for labels in found for label in labels)), np.float32)
        for row, labels in zip(rows, found, strict=True):
            row[[label.index for label in labels]] = [label.score for label in labels]
        return rows


# `rows`: the answers to `judged`, a row for each example; None: they are not compared.
Source = Texts | Arrays | Singles


def read_texts(file: str | None, wanted: int) -> list[str]:
    """The lines of a file, without empty ones, or built-in sentences. Raises Failure."""
    if file is None:
        return sentences(JUDGED_EXAMPLES + wanted)
    texts = [text for text in read_lines([file]) if text.strip()]
    if not texts:
        raise Failure(f"{file} has no texts; write one on each line")
    return texts


def read_pictures(paths: Sequence[str]) -> list[bytes]:
    """The contents of files, and of all files in folders. Raises Failure."""
    files = [
        file
        for path in map(Path, paths)
        for file in (sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path])
    ]
    pictures = []
    for file in files:
        with open_input(str(file)) as opened:
            pictures.append(opened.read())
    if not pictures:
        raise Failure(f"there is no picture in {', '.join(paths)}")
    return pictures


def read_pairs(file: str) -> tuple[NDArray[Any], list[str], list[str]]:
    """Scores and the two texts of each: lines of score, tab, text, tab, text. Raises Failure."""
    scores, firsts, seconds = [], [], []
    for number, line in enumerate(read_lines([file]), 1):
        try:
            score, first, second = line.split("\t")
            scores.append(float(score))
        except ValueError as error:
            raise Failure(f"{Path(file).name}, line {number}: not score, tab, text, tab, text") from error
        if not math.isfinite(scores[-1]):
            raise Failure(f"{Path(file).name}, line {number}: the score {score} is no number")
        firsts.append(first)
        seconds.append(second)
    if len(scores) < PAIRS_MIN:
        raise Failure(f"{file} has {len(scores)} pairs: too few for a correlation")
    if len(set(scores)) == 1:
        raise Failure(f"all pairs of {file} have the score {scores[0]:g}: there is nothing to correlate with")
    return np.array(scores), firsts, seconds
