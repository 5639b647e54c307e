"""The engine for tasks of kind "embed": texts in, one vector for each out.

The texts of all tasks of a batch are thrown together, sorted by length and cut into micro-batches by the number of
tokens that the model computes (with padding, unless it does without), so that a thousand callers with one sentence
each are served as fast as one with a thousand. A task is settled as soon as its last text is done. Each task stands for
itself: a bad one fails alone.

Everything that needs no arithmetic happens in `prepare`, while the batch before runs: parsing, tokenising, padding,
and the loading of a model that is asked for the first time. A task's run timeout so never counts the loading. Where
there is a cache (cache.py), texts that it knows are left out of all that.

Payloads: payload.py. Parameters: `engine` and `precision` (precision.py); each pair of them that is asked for is
a back end (backend.py) of its own.
"""

import contextlib
import json
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from multigpu.repository.model import ModelSpec
from multigpu.v1 import embed_pb2

from multigpu_worker.engines.base import Batch, EmbeddingCacheCounts, EngineSettings, Reporter
from multigpu_worker.engines.common.failures import LOADING_ERRORS, BadInputError, Failure, of_loading
from multigpu_worker.engines.common.memory import Limit, make_room
from multigpu_worker.engines.common.precision import Variant, choose, spec_of
from multigpu_worker.engines.embed.backend import AheadBackend, EmbedBackend, Vectors, load_backend
from multigpu_worker.engines.embed.payload import JSON, parse_texts
from multigpu_worker.engines.embed.text import Inputs
from multigpu_worker.models.folders import ModelFolderError

if TYPE_CHECKING:
    from multigpu_worker.engines.embed.cache import EmbedCache, ModelContent, Recall


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Texts of about the same length that go through the model together."""

    inputs: Inputs
    # For each text: its place among all texts of the batch, and which item it belongs to.
    places: npt.NDArray[np.int64]
    owners: npt.NDArray[np.int64]
    # The model computes their padding too.
    pads: bool = True

    @property
    def tokens(self) -> int:
        """How many the model computes."""
        return self.inputs["input_ids"].size if self.pads else int(self.inputs["attention_mask"].sum())

    def select(self, rows: "slice | npt.NDArray[np.bool_]") -> "MicroBatch":
        """Some of the texts, without the padding that only the others needed."""
        used = self.inputs["attention_mask"][rows].any(axis=0)
        inputs = {name: array[rows][:, used] for name, array in self.inputs.items()}
        return MicroBatch(inputs=inputs, places=self.places[rows], owners=self.owners[rows], pads=self.pads)

    def halves(self) -> "tuple[MicroBatch, MicroBatch]":
        middle = len(self.places) // 2
        return self.select(slice(middle)), self.select(slice(middle, None))


# A micro-batch on its way through a device that works by itself, and what waits for its vectors.
UnderWay = tuple[MicroBatch, Callable[[], Vectors]]


@dataclass(slots=True, kw_only=True, eq=False)
class Prepared:
    """A batch that is ready to run."""

    # None: no item got as far as needing it.
    model: EmbedBackend | None = None
    limit: Limit = field(default_factory=Limit)
    # Items that fail, by their index in the batch.
    failures: dict[int, Failure] = field(default_factory=dict)
    # For each item its texts: the first place and the one after the last.
    spans: list[tuple[int, int]] = field(default_factory=list)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    # What the cache knew. None: there is none.
    recall: "Recall | None" = None
    # The model's identity when it was asked.
    identity: str = ""
    # The first of it, if the device was handed that before the batch before was done.
    begun: UnderWay | None = None

    def begin(self) -> None:
        """Hand the first micro-batch to the device. Where there is no room for it now there may be later."""
        if self.begun is None and self.micro_batches and isinstance(self.model, AheadBackend):
            micro_batch = self.micro_batches[0]
            if micro_batch.tokens <= self.model.tokens_max:
                with contextlib.suppress(MemoryError):
                    self.begun = micro_batch, self.model.begin(micro_batch.inputs)
                    del self.micro_batches[0]


class EmbedEngine:
    """Embeds texts with a model. Its own back end stays loaded, and of others the one that was asked for last."""

    one_by_one: ClassVar[bool] = False

    def __init__(self, settings: EngineSettings) -> None:
        """Build an engine; the first of the models is the default."""
        assert settings.threads >= 0
        self._settings = settings
        self._models = settings.models
        self._loaded: dict[tuple[str, Variant], EmbedBackend] = {}
        # Of each that was ever loaded.
        self._limits: dict[tuple[str, Variant], Limit] = {}
        self._cache: EmbedCache | None = None
        # What the cache knows a loaded model's files by.
        self._contents: dict[tuple[str, Variant], ModelContent] = {}
        # Batches that wait to be run, in order.
        self._waiting: deque[Prepared] = deque()
        if settings.embedding_cache.entries:
            from multigpu_worker.engines.embed import cache as embed_cache  # noqa: PLC0415 (most workers have none)

            self._cache = embed_cache.EmbedCache(settings.embedding_cache)
        if settings.threads:
            # The tokenizer's threads; read at its first use.
            os.environ["RAYON_NUM_THREADS"] = str(settings.threads)

    def load(self) -> dict[str, str]:
        """Load the model as tasks get it that ask for nothing special. Each back end tries itself out as it loads."""
        spec = next(iter(self._models.values()))
        try:
            variant = choose(spec, self._settings, {})
        except ValueError as error:
            raise ModelFolderError(f"{spec.id}: {error}: correct model.toml") from error
        return self._load(spec, variant)

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
            spec = spec_of(self._models, batch.model)
            variant = choose(spec, self._settings, batch.parameters)
            if (spec.id, variant) not in self._loaded:
                self._load(spec, variant)
            prepared.model = self._loaded[spec.id, variant]
            prepared.limit = self._limits[spec.id, variant]
        except LOADING_ERRORS as error:
            failure = of_loading(error)
        else:
            if self._cache is None:
                prepared.micro_batches = cut(prepared.model, texts, np.array(owners))
                self._waiting.append(prepared)
            else:
                prepared.identity = prepared.model.identity
                identity = self._contents[spec.id, variant].identity(prepared.identity)
                prepared.recall = self._cache.recall(identity, texts, np.array(owners), prepared.model.dimension)
                prepared.micro_batches = cut_missing(prepared.model, texts, prepared.recall)
            return prepared
        prepared.failures |= {i: failure for i in range(len(batch.items)) if i not in prepared.failures}
        return prepared

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        """Embed a prepared batch and settle every item that is not cancelled."""
        assert isinstance(prepared, Prepared)
        for index, failure in prepared.failures.items():
            reporter.fail(batch.items[index], failure.error_type, failure.message, retryable=failure.retryable)
        if prepared in self._waiting:  # with a cache it isn't, and remove's error would describe the whole model
            self._waiting.remove(prepared)
        if prepared.model is not None:
            _Run(batch, prepared, prepared.model, reporter, self._next_of).run()

    def _next_of(self, model: EmbedBackend) -> Prepared | None:
        """The batch that will run next, if it is the same model's."""
        following = next(iter(self._waiting.copy()), None)
        return following if following is not None and following.model is model else None

    def _load(self, spec: ModelSpec, variant: Variant) -> dict[str, str]:
        key = spec.id, variant
        make_room(self._loaded)
        self._limits[key] = Limit()
        if self._cache is None:
            self._loaded[key], facts = load_backend(spec, self._settings, variant)
            return facts
        from multigpu_worker.engines.embed.cache import ModelContent  # noqa: PLC0415 (most workers have none)

        content = ModelContent.read(spec.folder)
        backend, facts = load_backend(spec, self._settings, variant)
        content.check()
        self._loaded[key], self._contents[key] = backend, content
        return facts


class _Run:
    """One batch on its way through the model."""

    def __init__(
        self,
        batch: Batch,
        prepared: Prepared,
        model: EmbedBackend,
        reporter: Reporter,
        next_of: Callable[[EmbedBackend], Prepared | None],
    ) -> None:
        self._items = batch.items
        self._json = batch.content_type == JSON
        self._spans = prepared.spans
        self._model = model
        self._limit = prepared.limit
        self._begin = model.begin if isinstance(model, AheadBackend) else None
        self._reporter = reporter
        self._todo = prepared.micro_batches[::-1]
        self._begun = prepared.begun
        self._next_of = next_of
        self._recall = prepared.recall
        self._identity = prepared.identity
        self._vectors = np.empty((prepared.spans[-1][1], model.dimension), dtype="<f4")
        self._texts_left = [stop - start for start, stop in prepared.spans]
        # Items that were cancelled or failed: their texts are left out from here on.
        self._gone: set[int] = set()

    def run(self) -> None:
        if self._recall is not None:
            self._serve(self._recall)
        # On its way through a device that works by itself.
        under_way = self._begun
        while self._todo or under_way is not None:
            started = self._start(alone=under_way is None)
            if started is None and not self._todo and (following := self._next_of(self._model)) is not None:
                # The device has work while this batch ends.
                following.begin()
            if under_way is not None:
                self._finish(*under_way)
            under_way = started
            if under_way is not None and self._begin is None:
                self._finish(*under_way)
                under_way = None

    def _start(self, *, alone: bool) -> UnderWay | None:
        """Start on the next micro-batch. None: there is none, or it has to be cut, or to wait for memory."""
        while self._todo:
            micro_batch = self._wanted(self._todo.pop())
            if len(micro_batch.places) == 0:
                continue
            if micro_batch.tokens > self._model.tokens_max and len(micro_batch.places) > 1:
                self._todo.extend(reversed(micro_batch.halves()))
                continue
            if self._begin is None:
                return micro_batch, partial(self._model.embed, micro_batch.inputs)
            try:
                return micro_batch, self._begin(micro_batch.inputs)
            except MemoryError as error:
                shortage = str(error) or "MemoryError"
            if not alone:
                # There may be room when the one before is done.
                self._todo.append(micro_batch)
                return None
            self._shrink(micro_batch, shortage)
        return None

    def _finish(self, micro_batch: MicroBatch, vectors: Callable[[], Vectors]) -> None:
        shortage = ""
        try:
            self._take(micro_batch, vectors())
            self._model.tokens_max = self._limit.fitted(self._model.tokens_max)
        except MemoryError as error:
            shortage = str(error) or "MemoryError"
        # Out here, where the exception no longer holds on to what had been computed.
        if shortage:
            self._shrink(micro_batch, shortage)
        self._reporter.beat()

    def _wanted(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch less the texts that nobody wants any more."""
        askers = list(map(self._askers, micro_batch.places.tolist(), micro_batch.owners.tolist()))
        for index in {index for indices in askers for index in indices} - self._gone:
            if self._reporter.cancelled(self._items[index]):
                self._gone.add(index)
        keep = np.array([not self._gone.issuperset(indices) for indices in askers])
        return micro_batch if keep.all() else micro_batch.select(keep)

    def _askers(self, place: int, owner: int) -> list[int]:
        """The items that wait for the text in this place, which is `owner`'s: with a cache perhaps none, or more."""
        if self._recall is None:
            return [owner]
        if place in self._recall.late:
            return []
        others = self._recall.twins(place)
        return [owner, *self._recall.owners[others].tolist()] if others else [owner]

    def _take(self, micro_batch: MicroBatch, vectors: Vectors) -> None:
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

    def _share(self, places: list[int], vectors: Vectors, recall: "Recall") -> None:
        """Hand vectors to the same texts elsewhere in the batch, and to the cache."""
        recall.computed(places, vectors, keep=self._model.identity == self._identity)
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
            self._model.tokens_max = self._limit.lower(self._model.tokens_max, micro_batch.tokens // 2)
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


def cut(model: EmbedBackend, texts: list[str], owners: npt.NDArray[np.int64]) -> list[MicroBatch]:
    """Micro-batches of texts, longest first: if memory is short, that shows at once."""
    tokens = model.text.tokenise(texts)
    lengths = tokens.lengths()
    order = np.argsort(-lengths, kind="stable")
    totals = np.cumsum(lengths[order])
    micro_batches = []
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        if model.pads:
            stop = start + model.tokens_max // max(1, longest)
        else:
            stop = int(np.searchsorted(totals, totals[start] - longest + model.tokens_max, side="right"))
        places = order[start : max(stop, start + 1)]
        inputs = model.text.pad(tokens, places.tolist())
        micro_batches.append(MicroBatch(inputs=inputs, places=places, owners=owners[places], pads=model.pads))
        start += len(places)
    return micro_batches


def cut_missing(model: EmbedBackend, texts: list[str], recall: "Recall") -> list[MicroBatch]:
    """Micro-batches of the texts that the cache doesn't know."""
    if not recall.missing:
        return []
    missing = np.array(recall.missing)
    micro_batches = cut(model, [texts[place] for place in recall.missing], recall.owners[missing])
    for micro_batch in micro_batches:
        micro_batch.places = missing[micro_batch.places]
    return micro_batches
