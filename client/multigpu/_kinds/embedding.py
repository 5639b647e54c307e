"""Tasks of kind "embed": texts in chunks, and the vectors in their results."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sized
from itertools import islice
from typing import TYPE_CHECKING, Any

from multigpu.errors import INVALID_ARGUMENT, InvalidTaskError, TransportError
from multigpu.options import EmbedOptions, Input, MapOptions
from multigpu.v1 import embed_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from multigpu.options import AnyIterable
    from multigpu.outcome import Outcome

    Vectors = NDArray[np.float32]

KIND = "embed"
BATCH_SIZE = 32
_BATCH_SIZE_MAX = 10_000


class Chunks:
    """Cuts texts into inputs of up to `batch_size` texts, and turns outcomes, in the same order, into rows again."""

    def __init__(self, batch_size: int) -> None:
        if not 1 <= batch_size <= _BATCH_SIZE_MAX:
            raise ValueError(f"batch_size is {batch_size}; an embed task takes 1 to {_BATCH_SIZE_MAX:,} texts")
        self._batch_size = batch_size
        # Texts of each input without an outcome.
        self._sizes: deque[int] = deque()

    def inputs(self, texts: AnyIterable[str]) -> Iterator[Input] | AsyncIterator[Input]:
        return self._cut_async(texts) if isinstance(texts, AsyncIterable) else self.cut(texts)

    def cut(self, texts: Iterable[str]) -> Iterator[Input]:
        iterator = iter(texts)
        while part := list(islice(iterator, self._batch_size)):
            yield self._input(part)

    async def _cut_async(self, texts: AsyncIterable[str]) -> AsyncIterator[Input]:
        part: list[str] = []
        async for text in texts:
            part.append(text)
            if len(part) == self._batch_size:
                yield self._input(part)
                part = []
        if part:
            yield self._input(part)

    def _input(self, part: list[str]) -> Input:
        for text in part:
            if not isinstance(text, str):  # protobuf takes bytes too
                wrong = f"one of them is of type {type(text).__name__}"
                raise InvalidTaskError(INVALID_ARGUMENT, f"embed takes strings of valid Unicode: {wrong}")
        try:
            payload = embed_pb2.EmbedPayload(texts=part).SerializeToString()
        except ValueError as error:
            raise InvalidTaskError(INVALID_ARGUMENT, f"embed takes strings of valid Unicode: {error}") from error
        self._sizes.append(len(part))
        return Input(payload=payload, units=len(part))

    def rows(self, outcome: Outcome) -> Vectors:
        """The vectors of the next input: float32 [texts, dimension], read-only, a view of the result's bytes.

        Raises the TaskError of a task that did not succeed.
        """
        import numpy as np  # noqa: PLC0415  a client that embeds nothing needs no numpy

        if not outcome.succeeded:
            raise outcome.to_error()
        texts = self._sizes.popleft()
        result = embed_pb2.EmbedResult.FromString(outcome.result)
        values = result.values
        if len(values) != 4 * result.dimension * texts:
            raise TransportError(
                f"the result of task {outcome.task_id} has {len(values)} bytes for {texts} vectors "
                f"of {result.dimension}: its worker speaks another protocol"
            )
        return np.frombuffer(values, dtype="<f4").reshape(texts, result.dimension)


def check_texts(texts: Any) -> None:
    """TypeError: a single string, which would be embedded character by character."""
    if isinstance(texts, str | bytes):
        raise TypeError("embed takes an iterable of strings; for one text pass [text]")


def check_options(options: Any) -> None:
    """TypeError: an option that maps have and embed lacks, such as `ordered`: each row belongs to its text."""
    for name in MapOptions.__annotations__:
        if name in options and name not in EmbedOptions.__annotations__:
            raise TypeError(f"{name} is an option of a map: embed has none of this name")


class Stack:
    """Gathers rows into one array; where their number is known, without a copy."""

    def __init__(self, texts: Any) -> None:
        self._expected = len(texts) if isinstance(texts, Sized) else None
        self._array: Vectors | None = None
        self._parts: list[Vectors] = []
        self._filled = 0
        self._dimension = 0

    def add(self, rows: Vectors) -> None:
        import numpy as np  # noqa: PLC0415  as above

        dimension = rows.shape[1]
        if self._dimension not in (0, dimension):
            raise TransportError(
                f"some workers gave vectors of {self._dimension}, others of {dimension}: "
                "they have different default models; name the model"
            )
        self._dimension = dimension
        if self._expected is None:
            self._parts.append(rows)
            return
        if self._array is None:
            self._array = np.empty((self._expected, dimension), np.float32)
        self._array[self._filled : self._filled + len(rows)] = rows
        self._filled += len(rows)

    def array(self) -> Vectors:
        """All rows, [n, dimension]; [0, 0] when there are none."""
        import numpy as np  # noqa: PLC0415  as above

        if self._array is not None:
            return self._array[: self._filled]
        return np.concatenate(self._parts, dtype=np.float32) if self._parts else np.empty((0, 0), np.float32)
