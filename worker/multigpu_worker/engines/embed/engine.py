"""The engine for tasks of kind "embed": texts in, one vector for each out.

The texts of all tasks of a batch are sorted by length and cut into micro-batches by the number of tokens that the model
computes, so a thousand callers with one sentence each are served as fast as one with a thousand. A task is settled as
soon as its last text is done, and a bad task fails alone.

`prepare` does everything before the arithmetic while the previous batch runs: parsing, tokenising, padding, and looking
texts up in the cache (cache.py).

Payloads: payload.py. Back ends: backend.py.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import structlog
from multigpu.v1 import embed_pb2

from multigpu_worker.engines.base import Batch, EmbeddingCacheCounts, EngineSettings, Reporter
from multigpu_worker.engines.common.failures import BadInputError, Failure, bad_input, check_parameters
from multigpu_worker.engines.common.limits import Limit
from multigpu_worker.engines.common.payloads import JSON
from multigpu_worker.engines.common.precision import choose
from multigpu_worker.engines.embed.backend import AheadBackend, EmbedBackend, MicroBatch, Vectors, cut, load_backend
from multigpu_worker.engines.embed.payload import EmbedInput, parse_texts
from multigpu_worker.engines.embed.text import Text
from multigpu_worker.engines.embed.token_level import TokenLevel
from multigpu_worker.repository.model import MEASURED, ModelFolderError

if TYPE_CHECKING:
    from multigpu_worker.engines.embed.cache import EmbedCache, Lookup
    from multigpu_worker.engines.embed.fastest import Trial

log = structlog.get_logger(__name__)

# A micro-batch that was started, and a function that waits for its vectors.
UnderWay = tuple[MicroBatch, Callable[[], Vectors]]


@dataclass(slots=True, kw_only=True, eq=False)
class LoadedModel:
    backend: EmbedBackend
    # Adapts the back end's tokens_max.
    limit: Limit = field(default_factory=Limit)
    # The hash of the model's folder, if there is a cache.
    content: bytes = b""


@dataclass(slots=True, kw_only=True, eq=False)
class Prepared:
    """A batch that is ready to run."""

    # By index in the batch.
    failures: dict[int, Failure] = field(default_factory=dict)
    # For each item, the place of its first text and the one after its last.
    spans: list[tuple[int, int]] = field(default_factory=list)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    # By index in the batch, the number of tokens of the items that ask for it.
    tokens: dict[int, int] = field(default_factory=dict)
    # None: there is no cache.
    lookup: "Lookup | None" = None
    # The back end's identity at the lookup.
    identity: str = ""
    token_level: TokenLevel = field(default_factory=TokenLevel)
    # The first micro-batch, if it was started before the previous batch was done.
    begun: UnderWay | None = None

    def begin(self, backend: EmbedBackend) -> None:
        """Start the first micro-batch, unless memory is short: there may be more later."""
        if self.begun is None and self.micro_batches and isinstance(backend, AheadBackend):
            micro_batch = self.micro_batches[0]
            if micro_batch.tokens <= backend.tokens_max:
                with contextlib.suppress(MemoryError):
                    self.begun = micro_batch, backend.begin(micro_batch.inputs)
                    del self.micro_batches[0]


class EmbedEngine:
    """Embeds texts."""

    one_by_one: ClassVar[bool] = False

    def __init__(self, settings: EngineSettings) -> None:
        assert settings.threads >= 0
        self._settings = settings
        (self._spec,) = settings.models.values()
        self._cache: EmbedCache | None = None
        # Prepared batches, in order. Not used with a cache, whose lookups at the start would come too early.
        self._waiting: deque[Prepared] = deque()
        if settings.embedding_cache.entries:
            from multigpu_worker.engines.embed import cache  # noqa: PLC0415 (most workers have none)

            self._cache = cache.EmbedCache(settings.embedding_cache)
        if settings.threads:
            # The tokenizer's threads; read at its first use.
            os.environ["RAYON_NUM_THREADS"] = str(settings.threads)

    def load(self) -> dict[str, str]:
        """Load the model as configured. The back end runs its trials as it loads, so there is no other warm-up.

        A model of the engine MEASURED serves on torch until a trial has been run on this host. If ONNX Runtime is
        faster, it takes over then; later loads know the result.
        """
        if self._spec.engine != MEASURED:
            return self._load(self._spec.engine)
        if choose(dataclasses.replace(self._spec, engine="torch"), self._settings).precision != "fp32":
            return self._load("torch")
        from multigpu_worker.engines.embed.fastest import Trial  # noqa: PLC0415  (of CPUs alone)

        try:
            trial = Trial(self._spec, self._settings)
            known = trial.known()
            if known is not None:
                return self._load(known["engine"], known["trial"])
        except (ModelFolderError, MemoryError, OSError) as error:
            return self._load("torch", self._no_trial(error))
        facts = self._load("torch", f"under way since {time.strftime('%H:%M:%S UTC', time.gmtime())}")
        threading.Thread(target=self._try, args=(trial, facts), name="trial of engines", daemon=True).start()
        return facts

    def _load(self, engine: str, trial: str = "") -> dict[str, str]:
        """Load the model on an engine. `trial`: the fact about the trial of engines; empty: there is none."""
        spec = dataclasses.replace(self._spec, engine=engine)
        variant = choose(spec, self._settings)
        if self._cache is None:
            backend, facts = load_backend(spec, self._settings, variant)
            self._model = LoadedModel(backend=backend)
        else:
            from multigpu_worker.repository.content import ModelContent  # noqa: PLC0415 (most workers have none)

            content = ModelContent.read(spec.folder)
            backend, facts = load_backend(spec, self._settings, variant)
            content.check()
            self._model = LoadedModel(backend=backend, content=content.digest)
        if trial:
            facts["trial of engines"] = trial
        return facts

    def _try(self, trial: "Trial", facts: dict[str, str]) -> None:
        """Run the trial, and load the faster engine. A batch under way keeps the back end that it began with."""
        try:
            result = trial.run()
            log.info("the engines of the model were tried", model=self._spec.id, **result)
            if result["engine"] == "torch":
                facts["trial of engines"] = result["trial"]
                return
            of_engine = self._load(result["engine"], result["trial"])
            for name in facts.keys() - of_engine.keys():
                del facts[name]
            facts |= of_engine
        except (ModelFolderError, MemoryError, OSError) as error:
            facts["trial of engines"] = self._no_trial(error)
        except Exception as error:
            log.exception("the model stays on torch: the trial of its engines failed", model=self._spec.id)
            facts["trial of engines"] = f"failed: {type(error).__name__}: {error}"

    def _no_trial(self, error: Exception) -> str:
        """The fact about a trial that this error ended."""
        problem = f"{type(error).__name__}: {error}"
        log.warning("the model stays on torch: its engines can't be tried", model=self._spec.id, problem=problem)
        return f"failed: {problem}"

    def cache_counts(self) -> EmbeddingCacheCounts | None:
        """None: there is no cache."""
        return None if self._cache is None else self._cache.counts()

    def close(self) -> None:
        """Close the cache's file."""
        if self._cache is not None:
            self._cache.close()

    def prepare(self, batch: Batch) -> Prepared:
        """Parse and tokenise a batch. `run` reports the failures."""
        backend, prepared = self._model.backend, Prepared()
        asked: dict[int, EmbedInput] = {}
        for index, item in enumerate(batch.items):
            try:
                check_parameters(batch)
                asked[index] = parse_texts(item.payload, batch.content_type)
            except BadInputError as error:
                prepared.failures[index] = bad_input(error)
        texts: list[Text] = []
        owners: list[int] = []
        for index in range(len(batch.items)):
            start = len(texts)
            if found := asked.get(index):
                try:
                    if found.output:
                        prepared.token_level.prepare(index, found, backend)
                    else:
                        backend.text.check_ids([text for text in found.texts if not isinstance(text, str)])
                        texts += found.texts
                        owners += [index] * len(found.texts)
                except BadInputError as error:
                    prepared.failures[index] = bad_input(error)
            prepared.spans.append((start, len(texts)))
        if not texts:
            return prepared
        counted = [index for index in dict.fromkeys(owners) if asked[index].count_tokens]
        if self._cache is None:
            tokens = backend.text.tokenise(texts)
            prepared.micro_batches = cut(backend, tokens, np.array(owners))
            counts = tokens.lengths()
            prepared.tokens = {index: int(counts[slice(*prepared.spans[index])].sum()) for index in counted}
            self._waiting.append(prepared)
            return prepared
        from multigpu_worker.engines.embed.cache import Lookup  # noqa: PLC0415 (most workers have none)

        prepared.identity = backend.identity
        identity = hashlib.sha256(self._model.content + prepared.identity.encode()).digest()
        prepared.lookup = Lookup(self._cache, identity, texts, np.array(owners), backend.dimension)
        prepared.micro_batches = cut_missing(backend, texts, prepared.lookup)
        for index in counted:
            # Texts with a known vector were not tokenised.
            prepared.tokens[index] = int(backend.text.tokenise(asked[index].texts).lengths().sum())
        return prepared

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        """Embed a prepared batch and settle every item that is not cancelled."""
        assert isinstance(prepared, Prepared)
        if prepared in self._waiting:  # the ValueError of `remove` would describe the whole model
            self._waiting.remove(prepared)
        for index, failure in prepared.failures.items():
            failure.report(batch.items[index], reporter)
        prepared.token_level.run(batch, reporter, self._settings.result_bytes_max)
        _Run(batch, prepared, self._model, reporter, self._waiting).run()


class _Run:
    """One batch on its way through the model."""

    def __init__(
        self,
        batch: Batch,
        prepared: Prepared,
        model: LoadedModel,
        reporter: Reporter,
        waiting: deque[Prepared],
    ) -> None:
        self._items = batch.items
        self._json = batch.content_type == JSON
        self._spans = prepared.spans
        self._model = model.backend
        self._limit = model.limit
        self._begin = self._model.begin if isinstance(self._model, AheadBackend) else None
        self._reporter = reporter
        self._todo = prepared.micro_batches[::-1]
        self._begun = prepared.begun
        self._waiting = waiting
        self._lookup = prepared.lookup
        self._identity = prepared.identity
        self._tokens = prepared.tokens
        self._vectors = np.empty((prepared.spans[-1][1], self._model.dimension), dtype="<f4")
        self._texts_left = [stop - start for start, stop in prepared.spans]
        # Items that were cancelled or failed: their texts are skipped.
        self._gone: set[int] = set()

    def run(self) -> None:
        if self._lookup is not None:
            self._take_known(self._lookup)
        under_way = self._begun
        while self._todo or under_way is not None:
            started = self._start(alone=under_way is None)
            if started is None and not self._todo and self._waiting:
                # The device has work while this batch ends. Only this thread removes batches.
                self._waiting[0].begin(self._model)
            if under_way is not None:
                self._finish(*under_way)
            under_way = started
            if under_way is not None and self._begin is None:
                self._finish(*under_way)
                under_way = None

    def _start(self, *, alone: bool) -> UnderWay | None:
        """Start the next micro-batch. None: there is none, or it waits for memory that another one uses."""
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
        # After the except clause, because the exception references the tensors of the forward pass.
        if shortage:
            self._shrink(micro_batch, shortage)
        self._reporter.beat()

    def _wanted(self, micro_batch: MicroBatch) -> MicroBatch:
        """The micro-batch without texts that no item needs any more."""
        askers = list(map(self._askers, micro_batch.places.tolist(), micro_batch.owners.tolist()))
        for index in {index for indices in askers for index in indices} - self._gone:
            if self._reporter.cancelled(self._items[index]):
                self._gone.add(index)
        keep = np.array([not self._gone.issuperset(indices) for indices in askers])
        return micro_batch if keep.all() else micro_batch.select(keep)

    def _askers(self, place: int, owner: int) -> list[int]:
        """The items that wait for `owner`'s text at this place. With a cache there may be none, or several."""
        if self._lookup is None:
            return [owner]
        if place in self._lookup.late:
            return []
        others = self._lookup.duplicates(place)
        return [owner, *self._lookup.owners[others].tolist()] if others else [owner]

    def _take(self, micro_batch: MicroBatch, vectors: Vectors) -> None:
        self._vectors[micro_batch.places] = vectors
        self._settle(micro_batch.owners.tolist())
        if self._lookup is not None:
            self._share(micro_batch.places.tolist(), vectors, self._lookup)

    def _settle(self, owners: list[int]) -> None:
        """Count one more text as done for each of these items."""
        for index in owners:
            self._texts_left[index] -= 1
            if self._texts_left[index] == 0 and index not in self._gone:
                self._succeed(index)

    def _take_known(self, lookup: "Lookup") -> None:
        known = lookup.begin()
        if known.places:
            vectors = np.frombuffer(b"".join(known.vectors), dtype="<f4")
            self._vectors[known.places] = vectors.reshape(len(known.places), -1)
            self._settle(lookup.owners[known.places].tolist())

    def _share(self, places: list[int], vectors: Vectors, lookup: "Lookup") -> None:
        """Copy vectors to equal texts of the batch, and store them in the cache."""
        lookup.computed(places, vectors, keep=self._model.identity == self._identity)
        for place in places:
            if others := lookup.duplicates(place):
                self._vectors[others] = self._vectors[place]
                self._settle(lookup.owners[others].tolist())

    def _succeed(self, index: int) -> None:
        start, stop = self._spans[index]
        rows = self._vectors[start:stop]
        if self._json:
            self._reporter.succeed(self._items[index], json.dumps(rows.tolist()).encode(), JSON)
            return
        tokens = self._tokens.get(index, 0)
        result = embed_pb2.EmbedResult(dimension=self._model.dimension, values=rows.tobytes(), tokens=tokens)
        self._reporter.succeed(self._items[index], result.SerializeToString())

    def _shrink(self, micro_batch: MicroBatch, shortage: str) -> None:
        """Lower the limit and try again in halves, or fail the items of a single text."""
        if len(micro_batch.places) > 1:
            self._model.tokens_max = self._limit.lower(self._model.tokens_max, micro_batch.tokens // 2)
            self._todo.append(micro_batch)
            return
        owners = micro_batch.owners.tolist()
        if self._lookup is not None:
            owners += self._lookup.owners[self._lookup.duplicates(int(micro_batch.places[0]))].tolist()
        message = (
            f"out of memory on one text of {micro_batch.tokens} tokens: "
            f"free memory on the device, shorten the text, or set a lower precision in model.toml ({shortage})"
        )
        for index in dict.fromkeys(owners):
            if index not in self._gone:
                self._gone.add(index)
                self._reporter.fail(self._items[index], "OutOfMemory", message, retryable=True)


def cut_missing(model: EmbedBackend, texts: Sequence[Text], lookup: "Lookup") -> list[MicroBatch]:
    """Micro-batches of the texts that are not in the cache."""
    if not lookup.missing:
        return []
    missing = np.array(lookup.missing)
    tokens = model.text.tokenise([texts[place] for place in lookup.missing])
    micro_batches = cut(model, tokens, lookup.owners[missing])
    for micro_batch in micro_batches:
        micro_batch.places = missing[micro_batch.places]
    return micro_batches
