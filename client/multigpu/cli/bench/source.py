"""The examples of `mgpuctl bench`: texts, arrays, or tasks of one example each.

Each round has new texts, as long as there are enough: an embedding cache must not answer them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multigpu._kinds import classification, inference
from multigpu.cli.bench.sentences import sentences
from multigpu.cli.failures import Failure
from multigpu.cli.tasks.lines import open_input, read_lines
from multigpu.v1 import embed_pb2

# Examples that load and warm up a model.
FIRST_EXAMPLES = 64


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
    # Of all payloads: empty for raw bytes, "application/json" for JSON values.
    content_type = ""
    # Items and batch size of the examples that load a model.
    first = (FIRST_EXAMPLES, FIRST_EXAMPLES)

    def __init__(self, texts: Sequence[str]) -> None:
        self._endless: Iterator[str] = itertools.cycle(texts)

    def portion(self, items: int, batch_size: int) -> Portion:
        """The next tasks, of about this many items."""
        texts = list(itertools.islice(self._endless, items))
        parts = [texts[at : at + batch_size] for at in range(0, len(texts), batch_size)]
        payloads = [embed_pb2.EmbedPayload(texts=part).SerializeToString() for part in parts]
        return Portion(payloads=payloads, sizes=[len(part) for part in parts])


class Arrays:
    content_type = ""

    def __init__(self, inputs: Mapping[str, NDArray[Any]]) -> None:
        lengths = {len(array) if array.ndim else 0 for array in inputs.values()}
        if len(lengths) != 1 or 0 in lengths:
            raise Failure(
                "all inputs must have the same first dimension, the number of examples, and at least one example"
            )
        self._inputs = inputs
        self.first = (*lengths, *lengths)

    def portion(self, items: int, batch_size: int) -> Portion:
        batch = {name: np.resize(array, (batch_size, *array.shape[1:])) for name, array in self._inputs.items()}
        payload, _ = inference.input_of(batch, ())
        return Portion(payloads=[payload], sizes=[batch_size], times=max(1, items // batch_size))


class Singles:
    """One example in each task: to classify, or for a handler."""

    def __init__(self, payloads: Sequence[bytes], content_type: str = "") -> None:
        self.content_type = content_type
        self.first = (min(FIRST_EXAMPLES, len(payloads)), 1)
        self._endless: Iterator[bytes] = itertools.cycle(payloads)

    def portion(self, items: int, batch_size: int) -> Portion:
        assert batch_size == 1
        return Portion(payloads=list(itertools.islice(self._endless, items)), sizes=[1] * items)


Source = Texts | Arrays | Singles


def to_classify(subjects: Sequence[classification.Subject]) -> Singles:
    return Singles([classification.payload_of(each, classification.TOP_K) for each in subjects])


def read_texts(file: str | None, wanted: int) -> list[str]:
    """The lines of a file, without empty ones, or built-in sentences. Raises Failure."""
    if file is None:
        return sentences(wanted)
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
