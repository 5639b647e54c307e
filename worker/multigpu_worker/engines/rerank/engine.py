"""The engine for tasks of kind "rerank": a query and documents in, the score of each document out.

The pairs of all tasks of a batch are sorted by length and go through the model in micro-batches. `prepare` tokenises
while the previous batch runs. A task is settled as soon as its last document is scored, and a bad task fails alone.

Payload and result are `RerankPayload` and `RerankResult` (protos/multigpu/v1/rerank.proto), or JSON (payload.py).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from multigpu.v1 import rerank_pb2

from multigpu_worker.engines.base import Batch, EngineSettings, Item, Reporter
from multigpu_worker.engines.common.failures import BadInputError, Failure, bad_input, check_parameters
from multigpu_worker.engines.common.precision import choose_for_torch
from multigpu_worker.engines.embed.text import Tokens
from multigpu_worker.engines.rerank import payload as rerank_input

if TYPE_CHECKING:
    from multigpu_worker.engines.rerank.model import Reranker


@dataclass(slots=True, kw_only=True)
class Ready:
    """An item that the model can take."""

    item: Item
    payload: rerank_pb2.RerankPayload
    # Tokens of all its pairs.
    tokens: int
    # By document; filled by `run`.
    logits: npt.NDArray[np.float32]
    left: int
    # It was cancelled or failed: its documents are skipped.
    gone: bool = False


# A document: its item, its place in the payload, and the row of its pair in Prepared.pairs.
Document = tuple[Ready, int, int]


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A batch that is ready to run."""

    failures: list[tuple[Item, Failure]] = field(default_factory=list)
    pairs: Tokens = field(default_factory=lambda: Tokens(columns={"input_ids": []}))
    # The longest first, so that a shortage of memory shows at once.
    documents: list[Document] = field(default_factory=list)


class RerankEngine:
    """Scores documents with one model."""

    one_by_one: ClassVar[bool] = False

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        (self._spec,) = settings.models.values()

    def load(self) -> dict[str, str]:
        """Load the model as configured."""
        precision = choose_for_torch(self._spec, self._settings)
        from multigpu_worker.engines.rerank.model import load  # noqa: PLC0415  (takes seconds: torch)

        self._model = load(self._spec, self._settings, precision)
        text = f"pairs cut after {self._model.text.tokens_per_text_max} tokens"
        return {"engine": "torch", "precision": precision, "text": text}

    def close(self) -> None:
        """Nothing to write."""

    def prepare(self, batch: Batch) -> Prepared:
        """Tokenise the items. `run` reports the failures."""
        model = self._model
        prepared = Prepared(pairs=Tokens(columns={name: [] for name in model.text.inputs}))
        for item in batch.items:
            try:
                check_parameters(batch)
                payload = rerank_input.parse(item.payload, batch.content_type)
            except BadInputError as error:
                prepared.failures.append((item, bad_input(error)))
                continue
            pairs = model.text.tokenise_pairs(payload.query, payload.documents)
            count, first = len(payload.documents), len(prepared.pairs.columns["input_ids"])
            logits = np.empty(count, np.float32)
            ready = Ready(item=item, payload=payload, tokens=int(pairs.lengths().sum()), logits=logits, left=count)
            prepared.documents += [(ready, place, first + place) for place in range(count)]
            for name, column in pairs.columns.items():
                prepared.pairs.columns[name] += column
        lengths = prepared.pairs.lengths()
        prepared.documents.sort(key=lambda document: -lengths[document[2]])
        return prepared

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        """Score a prepared batch and settle every item that is not cancelled."""
        assert isinstance(prepared, Prepared)
        for item, failure in prepared.failures:
            failure.report(item, reporter)
        # The next document is the last one here.
        todo = prepared.documents[::-1]
        while todo:
            longest = max(1, len(prepared.pairs.columns["input_ids"][todo[-1][2]]))
            together = _pop(todo, max(1, self._model.budget // longest), reporter)
            if together and not self._run(together, prepared.pairs, self._model, batch.content_type, reporter):
                todo += together[::-1]
            reporter.beat()

    def _run(
        self, together: list[Document], pairs: Tokens, model: "Reranker", content_type: str, reporter: Reporter
    ) -> bool:
        """Run a micro-batch. False: memory ran out, and the budget was lowered."""
        try:
            logits = model.logits(pairs, [row for _, _, row in together])
        except MemoryError as error:
            if len(together) > 1:
                longest = len(pairs.columns["input_ids"][together[0][2]])
                model.budget = model.limit.lower(model.budget, longest * (len(together) // 2))
                return False
            ready = together[0][0]
            ready.gone = True
            message = f"out of memory on one document: free memory, or set a lower precision in model.toml ({error})"
            reporter.fail(ready.item, "OutOfMemory", message, retryable=True)
            return True
        model.budget = model.limit.fitted(model.budget)
        for (ready, place, _), logit in zip(together, logits, strict=True):
            ready.logits[place] = logit
            ready.left -= 1
            if ready.left == 0:
                scores = ready.logits if ready.payload.raw_scores else sigmoid(ready.logits)
                tokens = ready.tokens if ready.payload.count_tokens else 0
                reporter.succeed(ready.item, rerank_input.result(scores.tolist(), tokens, content_type), content_type)
        return True


def _pop(todo: list[Document], count: int, reporter: Reporter) -> list[Document]:
    """Remove the next `count` documents from the end of `todo`, and return those that are still wanted."""
    together = todo[-count:][::-1]
    del todo[-count:]
    for ready in {id(ready): ready for ready, _, _ in together}.values():
        ready.gone = ready.gone or reporter.cancelled(ready.item)
    return [document for document in together if not document[0].gone]


def sigmoid(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The sigmoid of each logit. Never overflows, and keeps the order of small scores."""
    scores: npt.NDArray[np.float64] = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
    return scores
