"""The engine for tasks of kind "embed": texts in, one vector for each out.

The texts of all tasks of a batch are thrown together, sorted by length and cut into micro-batches by the number of
padded tokens, so that a thousand callers with one sentence each are served as fast as one with a thousand. A task is
settled as soon as its last text is done. Each task stands for itself: a bad one fails alone.

Everything that needs no arithmetic happens in `prepare`, while the batch before runs: parsing, tokenising, padding,
and the loading of a model that is asked for the first time. A task's run timeout so never counts the loading. Where
there is a cache (embed_cache.py), texts that it knows are left out of all that.

Payload and result are `EmbedPayload` and `EmbedResult` (protos/multigpu/v1/embed.proto), or with content type
"application/json" a list of strings (or one string) and a list of lists of numbers. Parameters: `precision`, one of
fp32 (the default), bf16 and fp16.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from multigpu.v1 import embed_pb2

from multigpu_worker.engines.base import Batch, EmbeddingCacheCounts, EmbeddingCacheSettings, Reporter
from multigpu_worker.engines.models import ModelFolderError, UnknownModelError, resolve_name

if TYPE_CHECKING:
    from torch import Tensor

    from multigpu_worker.engines.embed_cache import EmbedCache, Recall
    from multigpu_worker.engines.embed_model import EmbedModel

TEXTS_MAX = 10_000
PRECISION_DEFAULT = "fp32"
PRECISIONS = ("fp32", "bf16", "fp16")
JSON = "application/json"


class BadInputError(ValueError):
    """The task can't be run as it is, here or anywhere. The message says what to change."""


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Texts of about the same length that go through the model together."""

    inputs: "dict[str, Tensor]"
    # For each text: its place among all texts of the batch, and which item it belongs to.
    places: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """With padding."""
        return self.inputs["input_ids"].numel()

    def select(self, rows: "slice | npt.NDArray[np.bool_]") -> "MicroBatch":
        """Some of the texts, without the padding that only the others needed."""
        used = self.inputs["attention_mask"][rows].any(dim=0)
        inputs = {name: tensor[rows][:, used] for name, tensor in self.inputs.items()}
        return MicroBatch(inputs=inputs, places=self.places[rows], owners=self.owners[rows])

    def halves(self) -> "tuple[MicroBatch, MicroBatch]":
        middle = len(self.places) // 2
        return self.select(slice(middle)), self.select(slice(middle, None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an item fails."""

    error_type: str
    message: str
    retryable: bool


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A batch that is ready to run."""

    # None: no item got as far as needing it.
    model: "EmbedModel | None" = None
    # Items that fail, by their index in the batch.
    failures: dict[int, Failure] = field(default_factory=dict)
    # For each item its texts: the first place and the one after the last.
    spans: list[tuple[int, int]] = field(default_factory=list)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    # What the cache knew. None: there is none.
    recall: "Recall | None" = None


class EmbedEngine:
    """Embeds texts with the models of this worker. Loaded models stay: at most one for each name and precision."""

    one_by_one: ClassVar[bool] = False

    def __init__(
        self, device: str, models: dict[str, Path], threads: int, cache: EmbeddingCacheSettings | None = None
    ) -> None:
        """Build an engine on `device` ("cpu" or "cuda:N"); the first of `models` is the default; threads 0: all.

        CacheFileError: the cache's file can't be had.
        """
        assert threads >= 0
        self._device = device
        self._models = models
        self._threads = threads
        self._loaded: dict[tuple[str, str], EmbedModel] = {}
        self._cache: EmbedCache | None = None
        # What the cache knows a loaded model by.
        self._identities: dict[tuple[str, str], bytes] = {}
        if cache is not None and cache.entries:
            from multigpu_worker.engines import embed_cache  # noqa: PLC0415 (most workers have none)

            self._cache = embed_cache.EmbedCache(cache)
        if threads:
            # The tokenizer's threads; read at its first use.
            os.environ["RAYON_NUM_THREADS"] = str(threads)

    def resident_models(self) -> list[str]:
        """Names of the models loaded now, each once."""
        return list(dict.fromkeys(name for name, _ in list(self._loaded)))

    def cache_counts(self) -> EmbeddingCacheCounts | None:
        """What the embedding cache has done; None: there is none."""
        return None if self._cache is None else self._cache.counts()

    def close(self) -> None:
        """Write what the cache has yet to write."""
        if self._cache is not None:
            self._cache.close()

    def prepare(self, batch: Batch) -> Prepared:
        """Parse and tokenise a batch, loading its model if need be. What fails is noted for `run` to say."""
        prepared = Prepared()
        texts: list[str] = []
        owners: list[int] = []
        for index, item in enumerate(batch.items):
            start = len(texts)
            try:
                found = parse_texts(item.payload, batch.content_type)
                texts += found
                owners += [index] * len(found)
            except BadInputError as error:
                prepared.failures[index] = Failure(error_type="BadInput", message=str(error), retryable=False)
            prepared.spans.append((start, len(texts)))
        if not texts:
            return prepared
        try:
            name, precision = resolve_name(self._models, batch.model), _precision(batch.parameters)
            prepared.model = self._model(name, precision)
        except BadInputError as error:
            failure = Failure(error_type="BadInput", message=str(error), retryable=False)
        except UnknownModelError as error:
            failure = Failure(error_type="UnknownModel", message=str(error), retryable=False)
        except (ModelFolderError, MemoryError, RuntimeError) as error:
            # Another worker may have a sound copy, or more memory.
            failure = Failure(error_type="ModelLoadError", message=str(error), retryable=True)
        except ImportError as error:
            message = f"{error}: install multigpu[worker] where this worker runs"
            failure = Failure(error_type="ModelLoadError", message=message, retryable=True)
        else:
            if self._cache is None:
                prepared.micro_batches = cut(prepared.model, texts, np.array(owners))
            else:
                identity, dimension = self._identities[name, precision], prepared.model.dimension
                prepared.recall = self._cache.recall(identity, texts, np.array(owners), dimension)
                prepared.micro_batches = cut_missing(prepared.model, texts, prepared.recall)
            return prepared
        prepared.failures |= {i: failure for i in range(len(batch.items)) if i not in prepared.failures}
        return prepared

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        """Embed a prepared batch and settle every item that is not cancelled."""
        assert isinstance(prepared, Prepared)
        for index, failure in prepared.failures.items():
            reporter.fail(batch.items[index], failure.error_type, failure.message, retryable=failure.retryable)
        if prepared.model is not None:
            self._set_threads()
            _Run(batch, prepared, prepared.model, reporter).run()

    def _model(self, name: str, precision: str) -> "EmbedModel":
        if (name, precision) not in self._loaded:
            from multigpu_worker.engines.embed_model import load_model  # noqa: PLC0415 (takes seconds: torch)

            self._set_threads()
            if self._cache is None:
                self._loaded[name, precision] = load_model(self._models[name], self._device, precision)
            else:
                from multigpu_worker.engines.embed_cache import ModelContent  # noqa: PLC0415 (as above)

                content = ModelContent.read(self._models[name])
                model = load_model(self._models[name], self._device, precision)
                content.check()
                self._identities[name, precision] = content.identity(precision, self._device)
                self._loaded[name, precision] = model
        return self._loaded[name, precision]

    def _set_threads(self) -> None:
        """Bind the calling thread too: OpenMP keeps the number for each thread that starts parallel work."""
        import torch  # noqa: PLC0415 (takes seconds)

        if self._threads:
            torch.set_num_threads(self._threads)


class _Run:
    """One batch on its way through the model."""

    def __init__(self, batch: Batch, prepared: Prepared, model: "EmbedModel", reporter: Reporter) -> None:
        self._items = batch.items
        self._json = batch.content_type == JSON
        self._spans = prepared.spans
        self._model = model
        self._reporter = reporter
        self._todo = prepared.micro_batches[::-1]
        self._recall = prepared.recall
        self._vectors = np.empty((prepared.spans[-1][1], model.dimension), dtype="<f4")
        self._texts_left = [stop - start for start, stop in prepared.spans]
        # Items that were cancelled or failed: their texts are left out from here on.
        self._gone: set[int] = set()

    def run(self) -> None:
        if self._recall is not None:
            self._serve(self._recall)
        while self._todo:
            micro_batch = self._wanted(self._todo.pop())
            if len(micro_batch.places) == 0:
                continue
            if micro_batch.tokens > self._model.tokens_max and len(micro_batch.places) > 1:
                self._todo.extend(reversed(micro_batch.halves()))
                continue
            shortage = ""
            try:
                self._take(micro_batch, self._model.embed(micro_batch.inputs))
            except MemoryError as error:
                shortage = str(error) or "MemoryError"
            # Out here, where the exception no longer holds on to what had been computed.
            if shortage:
                self._shrink(micro_batch, shortage)
            self._reporter.beat()

    def _wanted(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch less the texts that nobody wants any more."""
        for index in set(micro_batch.owners.tolist()) - self._gone:
            if self._reporter.cancelled(self._items[index]):
                self._gone.add(index)
        if self._recall is None:
            keep = np.array([owner not in self._gone for owner in micro_batch.owners.tolist()])
        else:
            keep = self._still_needed(micro_batch, self._recall)
        return micro_batch if keep.all() else micro_batch.select(keep)

    def _take(self, micro_batch: MicroBatch, vectors: npt.NDArray[np.float32]) -> None:
        self._vectors[micro_batch.places] = vectors
        self._settle(micro_batch.owners.tolist())
        if self._recall is not None:
            self._share(micro_batch.places.tolist(), vectors, self._recall)

    def _settle(self, owners: list[int]) -> None:
        """One text more is done for each of these items."""
        for index in owners:
            self._texts_left[index] -= 1
            if self._texts_left[index] == 0 and index not in self._gone:
                self._succeed(index)

    def _serve(self, recall: "Recall") -> None:
        """Take what the cache knows."""
        known = recall.begin()
        if known.places:
            vectors = np.frombuffer(b"".join(known.vectors), dtype="<f4")
            self._vectors[known.places] = vectors.reshape(len(known.places), -1)
            self._settle(recall.owners[known.places].tolist())

    def _still_needed(self, micro_batch: MicroBatch, recall: "Recall") -> npt.NDArray[np.bool_]:
        """Which texts somebody waits for, and nobody has computed: a text may be there for other items too."""
        return np.array(
            [
                place not in recall.late and (owner not in self._gone or bool(recall.twins(place)))
                for place, owner in zip(micro_batch.places.tolist(), micro_batch.owners.tolist(), strict=True)
            ]
        )

    def _share(self, places: list[int], vectors: npt.NDArray[np.float32], recall: "Recall") -> None:
        """Hand vectors to the same texts elsewhere in the batch, and to the cache."""
        recall.keep(places, vectors)
        for place in places:
            if others := recall.twins(place):
                self._vectors[others] = self._vectors[place]
                self._settle(recall.owners[others].tolist())

    def _succeed(self, index: int) -> None:
        start, stop = self._spans[index]
        rows = self._vectors[start:stop]
        if self._json:
            self._reporter.succeed(self._items[index], json.dumps(rows.tolist()).encode(), JSON)
            return
        result = embed_pb2.EmbedResult(dimension=self._model.dimension, values=rows.tobytes())
        self._reporter.succeed(self._items[index], result.SerializeToString())

    def _shrink(self, micro_batch: MicroBatch, shortage: str) -> None:
        """Go on in halves; a single text that does not fit fails its item."""
        if len(micro_batch.places) > 1:
            # Remembered with the model, so that only the first batch of many pays for finding out.
            self._model.tokens_max = micro_batch.tokens // 2
            self._todo.append(micro_batch)
            return
        owners = micro_batch.owners.tolist()
        if self._recall is not None:
            owners += self._recall.owners[self._recall.twins(int(micro_batch.places[0]))].tolist()
        message = (
            f"out of memory on one text of {micro_batch.tokens} tokens: "
            f"free memory on the device, shorten the text, or use precision=bf16 ({shortage})"
        )
        for index in dict.fromkeys(owners):
            if index not in self._gone:
                self._gone.add(index)
                self._reporter.fail(self._items[index], "OutOfMemory", message, retryable=True)


def parse_texts(payload: bytes, content_type: str) -> list[str]:
    """The texts of one payload: at least one, at most TEXTS_MAX. Raises BadInputError."""
    if content_type == JSON:
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"the payload is no JSON ({error}): send a list of strings") from error
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BadInputError("the payload must be a JSON list of strings, or one string")
        if not all(map(_is_unicode, texts)):
            raise BadInputError("a text has half of a surrogate pair: send well-formed Unicode")
    elif content_type == "":
        try:
            texts = list(embed_pb2.EmbedPayload.FromString(payload).texts)
        except DecodeError as error:
            raise BadInputError(
                f"the payload is no multigpu.v1.EmbedPayload ({error}): send one, or JSON with content type {JSON}"
            ) from error
    else:
        raise BadInputError(f'content type {content_type!r} is not supported: leave it empty or use "{JSON}"')
    if not texts:
        raise BadInputError("the payload has no texts: send at least one")
    if len(texts) > TEXTS_MAX:
        raise BadInputError(f"the payload has {len(texts)} texts: send at most {TEXTS_MAX} in one task")
    return texts


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _precision(parameters: dict[str, str]) -> str:
    unknown = sorted(set(parameters) - {"precision"})
    if unknown:
        raise BadInputError(f"embed has no parameter {unknown[0]!r}: it has precision")
    precision = parameters.get("precision", PRECISION_DEFAULT)
    if precision not in PRECISIONS:
        raise BadInputError(f"precision {precision!r} is none of {', '.join(PRECISIONS)}")
    return precision


def cut(model: "EmbedModel", texts: list[str], owners: npt.NDArray[np.int64]) -> list[MicroBatch]:
    """Micro-batches of texts, longest first: if memory is short, that shows at once."""
    tokens = model.tokenise(texts)
    lengths = tokens.lengths()
    order = np.argsort(-lengths, kind="stable")
    micro_batches = []
    start = 0
    while start < len(order):
        rows_max = max(1, model.tokens_max // max(1, int(lengths[order[start]])))
        places = order[start : start + rows_max]
        micro_batches.append(
            MicroBatch(inputs=model.pad(tokens, places.tolist()), places=places, owners=owners[places])
        )
        start += len(places)
    return micro_batches


def cut_missing(model: "EmbedModel", texts: list[str], recall: "Recall") -> list[MicroBatch]:
    """Micro-batches of the texts that the cache doesn't know."""
    if not recall.missing:
        return []
    missing = np.array(recall.missing)
    micro_batches = cut(model, [texts[place] for place in recall.missing], recall.owners[missing])
    for micro_batch in micro_batches:
        micro_batch.places = missing[micro_batch.places]
    return micro_batches
