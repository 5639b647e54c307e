"""The examples of `mgpuctl bench`: texts, arrays or pictures, as the payloads of tasks.

Each round has new texts, as long as there are enough: an embedding cache must not answer them.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multigpu._kinds import classification, inference
from multigpu.cli.bench.sentences import sentences
from multigpu.cli.failures import Failure
from multigpu.cli.tasks.lines import read_lines
from multigpu.v1 import embed_pb2

# From a number of tasks and a batch size to the payloads of the next tasks.
Source = Callable[[int, int], list[bytes]]


def to_embed(texts: Sequence[str]) -> Source:
    endless = itertools.cycle(texts)

    def payloads(tasks: int, batch_size: int) -> list[bytes]:
        batches = (list(itertools.islice(endless, batch_size)) for _ in range(tasks))
        return [embed_pb2.EmbedPayload(texts=batch).SerializeToString() for batch in batches]

    return payloads


def to_infer(inputs: Mapping[str, NDArray[Any]]) -> Source:
    """All tasks are the same: the arrays, repeated or cut to the batch size. Raises Failure."""
    lengths = {len(array) if array.ndim else 0 for array in inputs.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise Failure("all inputs must have the same first dimension, the number of examples, and at least one example")

    def payloads(tasks: int, batch_size: int) -> list[bytes]:
        batch = {name: np.resize(array, (batch_size, *array.shape[1:])) for name, array in inputs.items()}
        return [inference.input_of(batch, ())[0]] * tasks

    return payloads


def to_classify(subjects: Sequence[classification.Subject]) -> Source:
    endless = itertools.cycle([classification.payload_of(each, classification.TOP_K) for each in subjects])
    return lambda tasks, _: list(itertools.islice(endless, tasks))


def read_texts(file: str | None, wanted: int) -> list[str]:
    """The lines of a file, without empty ones, or built-in sentences. Raises Failure."""
    if file is None:
        return sentences(wanted)
    texts = [text for text in read_lines([file]) if text.strip()]
    if not texts:
        raise Failure(f"{file} has no texts; write one on each line")
    return texts


def read_pictures(path: Path) -> list[bytes]:
    """The contents of a file, or of all files in a folder. Raises Failure."""
    files = sorted(filter(Path.is_file, path.iterdir())) if path.is_dir() else [path]
    if not files:
        raise Failure(f"there is no picture in {path}")
    try:
        return [file.read_bytes() for file in files]
    except OSError as error:
        raise Failure(f"can't read {error.filename}: {error.strerror}") from error
