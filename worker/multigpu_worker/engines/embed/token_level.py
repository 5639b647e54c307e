"""The outputs of the kind "embed" below the level of texts: vectors of tokens, tokens of texts, and texts of tokens.

They pass by the micro-batches and the cache. Tokens and texts are ready when a batch is prepared. Vectors of tokens are
computed text by text: they are large, and few callers ask for them.
"""

import traceback
from dataclasses import dataclass, field

from multigpu._handling.attempts import message_of
from multigpu.v1 import embed_pb2

from multigpu_worker.engines.base import Batch, Item, Reporter
from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.embed.backend import EmbedBackend, TokenBackend
from multigpu_worker.engines.embed.payload import EmbedInput
from multigpu_worker.engines.embed.text import Inputs, TextInput

# Characters of the texts of a task, together, for their tokens: the tokenizer takes a second for some megabytes.
CHARACTERS_MAX = 1_000_000


@dataclass(slots=True, kw_only=True)
class TokenLevel:
    """Items of a batch that ask for these outputs, by index in the batch."""

    ready: dict[int, bytes] = field(default_factory=dict)
    # A back end, and the inputs of each text.
    to_compute: dict[int, tuple[TokenBackend, list[Inputs]]] = field(default_factory=dict)

    def prepare(self, index: int, asked: EmbedInput, backend: EmbedBackend) -> None:
        """Raises BadInputError."""
        if asked.output == embed_pb2.EMBED_OUTPUT_TOKEN_VECTORS:
            self.to_compute[index] = _prepare(asked, backend)
            return
        read = _tokens if asked.output == embed_pb2.EMBED_OUTPUT_TOKENS else _texts
        self.ready[index] = read(asked, backend.text).SerializeToString()

    def run(self, batch: Batch, reporter: Reporter, result_bytes_max: int) -> None:
        """Settle every item that is not cancelled."""
        for index, result in self.ready.items():
            if not reporter.cancelled(batch.items[index]):
                reporter.succeed(batch.items[index], result)
        for index, (backend, inputs) in self.to_compute.items():
            item = batch.items[index]
            try:
                _compute(item, backend, inputs, reporter, result_bytes_max)
            except Exception as error:  # noqa: BLE001  the batch has tasks of other callers
                error_type = "OutOfMemory" if isinstance(error, MemoryError) else type(error).__name__
                text = "".join(traceback.format_exception(error))
                reporter.fail(item, error_type, message_of(error) or error_type, retryable=True, traceback=text)


def _prepare(asked: EmbedInput, backend: EmbedBackend) -> tuple[TokenBackend, list[Inputs]]:
    if not isinstance(backend, TokenBackend):
        raise BadInputError("the model's engine has vectors of texts only: vectors of tokens need engine torch or onnx")
    backend.text.check_ids([text for text in asked.texts if not isinstance(text, str)])
    tokens = backend.text.tokenise(asked.texts)
    return backend, [backend.text.pad(tokens, [row]) for row in range(len(asked.texts))]


def _compute(
    item: Item, backend: TokenBackend, inputs: list[Inputs], reporter: Reporter, result_bytes_max: int
) -> None:  # fmt: skip
    result, size_bytes = embed_pb2.EmbedResult(), 0
    values: list[bytes] = []
    for each in inputs:
        if reporter.cancelled(item):
            return
        try:
            (vectors,) = backend.embed_tokens(each)
        except MemoryError as error:
            message = f"out of memory on the vectors of {each['input_ids'].size} tokens: shorten the text ({error})"
            reporter.fail(item, "OutOfMemory", message, retryable=True)
            return
        size_bytes += 4 * vectors.size
        if size_bytes > result_bytes_max:  # what follows needs that memory three times, and protobuf ends at 2 GiB
            found = f"the vectors of the first {len(values) + 1} of {len(inputs)} texts have {size_bytes} bytes"
            message = f"{found}, the worker's result_bytes_max is {result_bytes_max}: send fewer texts in one task"
            reporter.fail(item, "ResultTooLarge", message, retryable=False)
            return
        result.lengths.append(len(vectors))
        result.dimension = vectors.shape[1]
        values.append(vectors.astype("<f4", copy=False).tobytes())
        reporter.beat()
    result.values = b"".join(values)
    result.tokens = sum(result.lengths)
    reporter.succeed(item, result.SerializeToString())


def _tokens(asked: EmbedInput, text: TextInput) -> embed_pb2.EmbedResult:
    characters = sum(map(len, asked.texts))
    if characters > CHARACTERS_MAX:
        raise BadInputError(f"the texts have {characters:,} characters: send at most {CHARACTERS_MAX:,} in one task")
    result = embed_pb2.EmbedResult()
    for each in asked.texts:
        assert isinstance(each, str)
        whole = text.prompt + each
        encoding = text.encode(each, special_tokens=asked.special_tokens)
        found = result.tokenised.add().tokens
        columns = (encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets)
        for id_, token, special, (start, stop) in zip(*columns, strict=True):
            if special:
                found.add(id=id_, text=token, special=True)
            else:
                found.add(id=id_, text=whole[start:stop], start=start, stop=stop)
    return result


def _texts(asked: EmbedInput, text: TextInput) -> embed_pb2.EmbedResult:
    ids = [each for each in asked.texts if not isinstance(each, str)]
    return embed_pb2.EmbedResult(texts=text.decode(ids, special_tokens=asked.special_tokens))
