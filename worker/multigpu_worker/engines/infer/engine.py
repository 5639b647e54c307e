"""The engine for tasks of kind "infer": tensors in, tensors out, through any model.

The first dimension of an input counts the examples. Examples of all tasks of a batch with equal signature (names, types
and other dimensions) go through the model together, at most `examples_max` at a time, and the outputs are split again.
That needs a row for each example in every output: the model declares it, or a test with one row and with two shows it.
(One result with as many rows proves nothing: it may be a table that has them by chance.) All other models get each task
alone and whole, as do those with `tasks_max = 1` under [batch]. If the model fails on a batch, each of its tasks is
tried alone, so only those fail that cannot run.

Payload, result and checks: payload.py. Back ends: backend.py.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from multigpu_worker.engines.base import Batch, EngineSettings, Item, Reporter
from multigpu_worker.engines.common.cuda_errors import context_is_lost
from multigpu_worker.engines.common.failures import BadInputError, Failure, bad_input, check_parameters
from multigpu_worker.engines.common.limits import Limit
from multigpu_worker.engines.common.precision import choose
from multigpu_worker.engines.common.tensors import Arrays
from multigpu_worker.engines.infer.backend import Forward, load_backend
from multigpu_worker.engines.infer.payload import Request, parse, result
from multigpu_worker.repository.signature import Signature

# The fact "tasks" of models whose tasks are neither joined nor split.
AS_CONFIGURED = "one by one, as [batch] tasks_max = 1 says"
AS_DECLARED = "one by one: not all inputs and outputs are declared with the same open first dimension"


@dataclass(slots=True, kw_only=True)
class Model:
    """A loaded model, and what tests have shown about it."""

    forward: Forward
    # Whether tasks may be joined and split. None: tested for each form of requests, with the result in `forms`.
    joins: bool | None
    forms: dict[Any, bool] = field(default_factory=dict)
    limit: Limit = field(default_factory=Limit)


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A batch that is ready to run."""

    # By index in the batch.
    failures: dict[int, Failure] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The examples of an item from `start` to before `stop`."""

    index: int
    start: int
    stop: int


class InferEngine:
    """Runs a model."""

    one_by_one: ClassVar[bool] = False

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        (self._spec,) = settings.models.values()

    def load(self) -> dict[str, str]:
        """Load the model as configured, and run it once if its spec says warm_up."""
        spec = self._spec
        forward, facts = load_backend(spec, self._settings, choose(spec, self._settings))
        joins = False if spec.batch.tasks_max == 1 else forward.per_example
        if joins is False:
            facts["tasks"] = AS_CONFIGURED if spec.batch.tasks_max == 1 else AS_DECLARED
        if spec.warm_up:
            facts["warm-up"] = warm_up(forward)
        self._model = Model(forward=forward, joins=joins)
        return facts

    def signature(self) -> Signature:
        """The inputs and outputs that the model declares."""
        forward = self._model.forward
        return Signature(
            inputs=tuple(spec.named() for spec in forward.inputs),
            outputs=tuple(spec.named() for spec in forward.outputs),
        )

    def close(self) -> None:
        """Nothing to write."""

    def prepare(self, batch: Batch) -> Prepared:
        """Parse a batch. `run` reports the failures."""
        prepared = Prepared()
        for index, item in enumerate(batch.items):
            try:
                check_parameters(batch)
                prepared.requests[index] = parse(item.payload, batch.content_type, self._model.forward)
            except BadInputError as error:
                prepared.failures[index] = bad_input(error)
        return prepared

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        """Run a prepared batch and settle every item that is not cancelled."""
        assert isinstance(prepared, Prepared)
        for index, failure in prepared.failures.items():
            failure.report(batch.items[index], reporter)
        _Run(batch, prepared.requests, self._model, reporter).run()


def warm_up(forward: Forward) -> str:
    """Run zeros through a model, with open dimensions of size 1. Returns the shapes, or why it could not run."""
    specs = [spec for spec in forward.inputs if spec.required]
    if any(spec.shape is None for spec in specs):
        return "none: the model doesn't say which shapes it takes"
    shapes = {spec.name: [size or 1 for size in spec.shape or ()] for spec in specs}
    described = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    guessed = any(None in (spec.shape or ())[1:] for spec in specs)
    try:
        forward({spec.name: np.zeros(shapes[spec.name], dtype=spec.dtype or "float32") for spec in specs})
    except MemoryError:
        raise
    except Exception as error:
        if not guessed or context_is_lost(str(error)):
            raise
        return f"none: the model doesn't take {described}"
    return described


class _Run:
    """One batch on its way through the model."""

    def __init__(self, batch: Batch, requests: dict[int, Request], model: Model, reporter: Reporter) -> None:
        self._items: list[Item] = batch.items
        self._content_type = batch.content_type
        self._requests = requests
        self._model = model
        self._reporter = reporter
        # By index of unfinished items: outputs of their pieces, in order, and the number of examples left.
        self._results: dict[int, list[Arrays]] = {}
        self._left = {index: request.examples for index, request in requests.items()}
        # Items that were cancelled or settled.
        self._gone: set[int] = set()

    def run(self) -> None:
        together: dict[Any, list[int]] = {}
        for index, request in self._requests.items():
            if self._joins(index, request):
                together.setdefault(request.signature, []).append(index)
            else:
                self._run_each([index])
        for indices in together.values():
            self._run_joined(indices)

    def _joins(self, index: int, request: Request) -> bool:
        """Whether an item may be joined with others and split. Tests the model if that is not known."""
        model = self._model
        if model.joins is False or request.examples == 0:
            return False
        known = model.forms.get(request.form, model.joins)
        if known is None and not self._is_gone(index):
            known = self._test_rows(index, request)
            self._reporter.beat()
            if known is not None:
                model.forms[request.form] = known
        return known is True

    def _test_rows(self, index: int, request: Request) -> bool | None:
        """Whether every output has as many rows as the inputs, for one and for two. None: this item cannot tell."""
        try:
            for rows in (1, 2):
                inputs = {name: np.repeat(array[:1], rows, axis=0) for name, array in request.inputs.items()}
                if not _has_rows(self._model.forward(inputs), rows):
                    return False
        except MemoryError:
            return None
        except Exception as error:
            if context_is_lost(str(error)):
                raise
        else:
            return True
        # The item cannot run at all, or the model needs its rows together.
        return False if self._run_whole(index, request) else None

    def _run_joined(self, indices: list[int]) -> None:
        """Run items whose examples may go through the model together."""
        form = self._requests[indices[0]].form
        if not self._model.forms.get(form, True):
            self._run_each(indices)
            return
        todo = [Piece(index=i, start=0, stop=self._requests[i].examples) for i in indices][::-1]
        while todo:
            pieces = self._take(todo)
            if not pieces:
                continue
            inputs = self._join(pieces)
            rows = sum(piece.stop - piece.start for piece in pieces)
            problem: Exception | None = None
            try:
                outputs = self._model.forward(inputs)
            except Exception as error:  # noqa: BLE001  any error of the model fails the items that cause it
                problem = error.with_traceback(None)
            self._reporter.beat()
            forward, limit = self._model.forward, self._model.limit
            if isinstance(problem, MemoryError) and rows > 1:
                forward.examples_max = limit.lower(forward.examples_max, rows // 2)
                todo.extend(reversed(pieces))
            elif problem is not None:
                if context_is_lost(str(problem)):
                    raise problem
                self._isolate(pieces, problem, todo)
            elif not _has_rows(outputs, rows):
                # The first dimension is not the examples', whatever was declared or tested.
                self._model.forms[form] = False
                rest = {piece.index for piece in [*pieces, *todo]}
                self._run_each([index for index in indices if index in rest])
                return
            else:
                forward.examples_max = limit.fitted(forward.examples_max)
                self._settle(pieces, outputs)

    def _take(self, todo: list[Piece]) -> list[Piece]:
        """Take pieces of at most `examples_max` examples."""
        room = self._model.forward.examples_max
        pieces = []
        while todo and room:
            piece = todo.pop()
            if self._is_gone(piece.index):
                continue
            cut = min(piece.stop, piece.start + room)
            if cut < piece.stop:
                todo.append(Piece(index=piece.index, start=cut, stop=piece.stop))
            pieces.append(Piece(index=piece.index, start=piece.start, stop=cut))
            room -= cut - piece.start
        return pieces

    def _join(self, pieces: list[Piece]) -> Arrays:
        first = self._requests[pieces[0].index].inputs
        return {
            name: np.concatenate([self._requests[p.index].inputs[name][p.start : p.stop] for p in pieces])
            for name in first
        }

    def _settle(self, pieces: list[Piece], outputs: Arrays) -> None:
        start = 0
        for piece in pieces:
            stop = start + piece.stop - piece.start
            self._results.setdefault(piece.index, []).append({n: array[start:stop] for n, array in outputs.items()})
            self._left[piece.index] -= stop - start
            start = stop
            if self._left[piece.index] == 0:
                parts = self._results.pop(piece.index)
                self._succeed(piece.index, {name: _stack([part[name] for part in parts]) for name in outputs})

    def _isolate(self, pieces: list[Piece], problem: Exception, todo: list[Piece]) -> None:
        """Fail a single item, or run each of several alone: one may have failed the others."""
        indices = list(dict.fromkeys(piece.index for piece in pieces))
        if len(indices) == 1:
            self._fail(indices[0], problem)
            return
        todo[:] = [piece for piece in todo if piece.index not in indices]
        for index in indices:
            self._results.pop(index, None)
            self._left[index] = self._requests[index].examples
            self._run_joined([index])

    def _run_each(self, indices: list[int]) -> None:
        """Run items one after the other, each with all its examples."""
        for index in indices:
            if not self._is_gone(index):
                self._run_whole(index, self._requests[index])

    def _run_whole(self, index: int, request: Request) -> bool:
        """Run an item alone and settle it. Returns whether the model could run it."""
        done = False
        try:
            outputs = self._model.forward({name: np.array(array) for name, array in request.inputs.items()})
        except Exception as error:
            if context_is_lost(str(error)):
                raise
            self._fail(index, error)
        else:
            done = True
            self._succeed(index, outputs)
        self._reporter.beat()
        return done

    def _is_gone(self, index: int) -> bool:
        if index not in self._gone and self._reporter.cancelled(self._items[index]):
            self._gone.add(index)
        return index in self._gone

    def _succeed(self, index: int, outputs: Arrays) -> None:
        self._gone.add(index)
        try:
            answer = result(outputs, self._requests[index].outputs, self._content_type)
        except BadInputError as error:
            bad_input(error).report(self._items[index], self._reporter)
        else:
            self._reporter.succeed(self._items[index], answer, self._content_type)

    def _fail(self, index: int, error: Exception) -> None:
        self._gone.add(index)
        error_type, message = type(error).__name__, str(error)
        if isinstance(error, MemoryError):
            error_type = "OutOfMemory"
            message = f"out of memory: free memory on the device, or send fewer or smaller examples ({error})"
        self._reporter.fail(self._items[index], error_type, message, retryable=True)


def _has_rows(outputs: Arrays, rows: int) -> bool:
    return all(array.ndim > 0 and len(array) == rows for array in outputs.values())


def _stack(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
