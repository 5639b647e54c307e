"""The engine for tasks of kind "classify": a picture or a text in, its likeliest classes out.

All tasks of a batch go through the model together, in micro-batches of about the same size. Each stands for itself: a
picture that can't be read fails alone. Unpacking and tokenising happen in `prepare`, while the batch before runs.

Payload and result are `ClassifyPayload` and `ClassifyResult` (protos/multigpu/v1/classify.proto), or JSON
(payload.py). Parameters: `engine` (torch) and `precision`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from multigpu_worker.engines.base import Batch, EngineSettings, Item, Reporter
from multigpu_worker.engines.classify import payload as classify_input
from multigpu_worker.engines.common.failures import LOADING_ERRORS, BadInputError, Failure, of_loading
from multigpu_worker.engines.common.memory import make_room
from multigpu_worker.engines.common.precision import Variant, choose

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

    # None: no item got as far as needing it.
    model: "Classifier | None" = None
    failures: list[tuple[Item, Failure]] = field(default_factory=list)
    # The largest first: if memory is short, that shows at once.
    ready: list[Ready] = field(default_factory=list)


class ClassifyEngine:
    """Classifies with one model. Its own precision stays loaded, and of others the one that was asked for last."""

    one_by_one: ClassVar[bool] = False

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._spec = next(iter(settings.models.values()))
        self._loaded: dict[Variant, Classifier] = {}

    def load(self) -> dict[str, str]:
        """Load the model as tasks get it that ask for nothing special."""
        variant = choose(self._spec, self._settings, {})
        model = self._model(variant)
        return {"engine": "torch", "precision": variant.precision, "classes": str(len(model.names))}

    def close(self) -> None:
        """Nothing is left to write."""

    def prepare(self, batch: Batch) -> Prepared:
        """Unpack or tokenise the items. What fails is noted for `run` to say."""
        try:
            model = self._model(choose(self._spec, self._settings, batch.parameters))
        except LOADING_ERRORS as error:
            failure = of_loading(error)
        else:
            return self._prepare(batch, model)
        return Prepared(failures=[(item, failure) for item in batch.items])

    def _prepare(self, batch: Batch, model: "Classifier") -> Prepared:
        prepared = Prepared(model=model)
        for item in batch.items:
            try:
                payload = classify_input.parse(item.payload, batch.content_type)
                features = model.front.features(payload)
            except BadInputError as error:
                failure = Failure(error_type="BadInput", message=str(error), retryable=False)
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
            reporter.fail(item, failure.error_type, failure.message, retryable=failure.retryable)
        todo = prepared.ready
        while todo:
            assert prepared.model is not None
            todo = [ready for ready in todo if not reporter.cancelled(ready.item)]
            count = min(len(todo), max(1, prepared.model.budget // todo[0].size)) if todo else 0
            if count and self._run(todo[:count], prepared.model, batch.content_type, reporter):
                todo = todo[count:]
            reporter.beat()

    def _run(self, together: list[Ready], model: "Classifier", content_type: str, reporter: Reporter) -> bool:
        """Run a micro-batch. False: memory ran out, and the model takes less from now on."""
        try:
            rows = model.probabilities([ready.features for ready in together])
        except MemoryError as error:
            if len(together) > 1:
                model.budget = model.limit.lower(model.budget, together[0].size * (len(together) // 2))
                return False
            message = f"out of memory on one input: free memory on the device, or use a lower precision ({error})"
            reporter.fail(together[0].item, "OutOfMemory", message, retryable=True)
            return True
        model.budget = model.limit.fitted(model.budget)
        for ready, row in zip(together, rows, strict=True):
            result = classify_input.result(row, model.names, ready.top_k, content_type)
            reporter.succeed(ready.item, result, content_type)
        return True

    def _model(self, variant: Variant) -> "Classifier":
        if variant not in self._loaded:
            if variant.engine != "torch":
                raise ValueError(f"classify runs on torch alone, not on {variant.engine}: leave `engine` out")
            from multigpu_worker.engines.classify import model as classify_model  # noqa: PLC0415  (takes seconds: torch)

            make_room(self._loaded)
            self._loaded[variant] = classify_model.load(self._spec, self._settings, variant.precision)
        return self._loaded[variant]
