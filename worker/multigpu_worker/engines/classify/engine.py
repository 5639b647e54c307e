"""The engine for tasks of kind "classify": a picture or a text in, its likeliest classes out.

All tasks of a batch go through the model together, in micro-batches of similar size. A picture that cannot be read
fails alone. `prepare` decodes and tokenises while the previous batch runs.

Payload and result are `ClassifyPayload` and `ClassifyResult` (protos/multigpu/v1/classify.proto), or JSON
(payload.py).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from multigpu_worker.engines.base import Batch, EngineSettings, Item, Reporter
from multigpu_worker.engines.classify import payload as classify_input
from multigpu_worker.engines.common.failures import BadInputError, Failure, bad_input, check_parameters
from multigpu_worker.engines.common.precision import choose_for_torch

if TYPE_CHECKING:
    from multigpu_worker.engines.classify.model import Classifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """An item that the model can take."""

    item: Item
    features: Any
    size: int
    top_k: int


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A batch that is ready to run."""

    failures: list[tuple[Item, Failure]] = field(default_factory=list)
    # The largest first, so that a shortage of memory shows at once.
    ready: list[Ready] = field(default_factory=list)


class ClassifyEngine:
    """Classifies with one model."""

    one_by_one: ClassVar[bool] = False

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        (self._spec,) = settings.models.values()

    def load(self) -> dict[str, str]:
        """Load the model as configured."""
        precision = choose_for_torch(self._spec, self._settings)
        from multigpu_worker.engines.classify.model import load  # noqa: PLC0415  (takes seconds: torch)

        self._model = load(self._spec, self._settings, precision)
        return {"engine": "torch", "precision": precision, "classes": str(len(self._model.names))}

    def close(self) -> None:
        """Nothing to write."""

    def prepare(self, batch: Batch) -> Prepared:
        """Decode or tokenise the items. `run` reports the failures."""
        model, prepared = self._model, Prepared()
        for item in batch.items:
            try:
                check_parameters(batch)
                payload = classify_input.parse(item.payload, batch.content_type)
                features = model.front.features(payload)
            except BadInputError as error:
                failure = bad_input(error)
            except MemoryError as error:
                failure = Failure(error_type="OutOfMemory", message=f"unpacking it: {error}", retryable=True)
            else:
                size = model.front.size(features)
                prepared.ready.append(Ready(item=item, features=features, size=size, top_k=payload.top_k))
                continue
            prepared.failures.append((item, failure))
        prepared.ready.sort(key=lambda ready: -ready.size)
        return prepared

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        """Classify a prepared batch and settle every item that is not cancelled."""
        assert isinstance(prepared, Prepared)
        for item, failure in prepared.failures:
            failure.report(item, reporter)
        todo = prepared.ready
        while todo:
            todo = [ready for ready in todo if not reporter.cancelled(ready.item)]
            count = min(len(todo), max(1, self._model.budget // todo[0].size)) if todo else 0
            if count and self._run(todo[:count], self._model, batch.content_type, reporter):
                todo = todo[count:]
            reporter.beat()

    def _run(self, together: list[Ready], model: "Classifier", content_type: str, reporter: Reporter) -> bool:
        """Run a micro-batch. False: memory ran out, and the budget was lowered."""
        try:
            rows = model.probabilities([ready.features for ready in together])
        except MemoryError as error:
            if len(together) > 1:
                model.budget = model.limit.lower(model.budget, together[0].size * (len(together) // 2))
                return False
            message = f"out of memory on one input: free memory, or set a lower precision in model.toml ({error})"
            reporter.fail(together[0].item, "OutOfMemory", message, retryable=True)
            return True
        model.budget = model.limit.fitted(model.budget)
        for ready, row in zip(together, rows, strict=True):
            result = classify_input.result(row, model.names, ready.top_k, content_type)
            reporter.succeed(ready.item, result, content_type)
        return True
