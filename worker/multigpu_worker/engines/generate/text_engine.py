"""What the engines of kind "generate" share: from a payload to a sequence, which a runner continues.

`prepare` parses and tokenises; `run` waits until its sequence ends. The agent passes one task at a time to each slot.

The text is sent in chunks. If an attempt is lost, the next one receives the chunks that the master has, and goes on
after their tokens.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from multigpu_worker.engines.base import Batch, EngineSettings, Item, Reporter
from multigpu_worker.engines.common.failures import BadInputError, bad_input, check_parameters
from multigpu_worker.engines.generate.payload import Request, read_before, read_request

if TYPE_CHECKING:
    from multigpu_worker.engines.generate.json_schema import Matcher
    from multigpu_worker.engines.generate.sequence import Sequence
    from multigpu_worker.engines.generate.token_bytes import TokenBytes


class TextModel(Protocol):
    """What tasks need to know of a model, whatever runs it. `context`: the most tokens of a sequence."""

    tokenizer: Any
    eos_ids: frozenset[int]
    vocabulary: int
    context: int
    token_bytes: "TokenBytes"

    def decode(self, token_ids: list[int]) -> str:
        """The text of tokens, without special tokens."""

    def matcher(self, json_schema: str) -> "Matcher | None":
        """What rejects tokens that a JSON schema does not allow; None: the runner does. Raises BadInputError."""


class Runner(Protocol):
    """Runs sequences, those of several threads at the same time."""

    def run(self, sequence: "Sequence") -> None:
        """Returns when it is settled or cancelled. Raises BadInputError, and what fails the task."""

    def close(self) -> None:
        """End its threads."""


class TextEngine:
    """Base of the engines. `load` sets `_model` and `_runner`."""

    one_by_one: ClassVar[bool] = True
    _model: TextModel | None
    _runner: Runner | None

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        (self._spec,) = settings.models.values()
        self._model = self._runner = None

    def close(self) -> None:
        """End the runner's threads."""
        if self._runner is not None:
            self._runner.close()

    def prepare(self, batch: Batch) -> "list[Request | BadInputError]":
        """Parse and tokenise each item. Errors are kept for `run`."""
        return [self._read(batch, item) for item in batch.items]

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        """Generate for one item after the other; the steps also have the sequences of other slots."""
        assert isinstance(prepared, list)
        for item, request in zip(batch.items, prepared, strict=True):
            if reporter.cancelled(item):
                continue
            try:
                if isinstance(request, BadInputError):
                    raise request
                self._run(batch, item, request, reporter)
            except BadInputError as error:
                bad_input(error).report(item, reporter)

    def _read(self, batch: Batch, item: Item) -> "Request | BadInputError":
        assert self._model is not None, "load comes first"
        try:
            self._check_parameters(batch)
            model = self._model
            return read_request(item.payload, batch.content_type, model.tokenizer, model.context, item.task_id)
        except BadInputError as error:
            return error

    def _check_parameters(self, batch: Batch) -> None:
        adapters = self._spec.adapters
        check_parameters(batch, ["adapter"] if adapters else [])
        if (adapter := batch.parameters.get("adapter", "")) and adapter not in adapters:
            raise BadInputError(f"the model has no adapter {adapter!r}; it has {', '.join(adapters)}")

    def _run(self, batch: Batch, item: Item, request: Request, reporter: Reporter) -> None:
        from multigpu_worker.engines.generate.sequence import Sequence  # noqa: PLC0415 (with the rest)
        from multigpu_worker.engines.generate.text import TextStream  # noqa: PLC0415 (with the rest)

        assert self._model is not None, "load comes first"
        assert self._runner is not None, "load comes first"
        schema = request.json_schema
        sequence = Sequence(
            item=item,
            reporter=reporter,
            request=request,
            content_type=batch.content_type,
            text=TextStream(self._model.decode, request.prompt_ids, request.stop),
            eos_ids=self._model.eos_ids,
            token_bytes=self._model.token_bytes,
            matcher=self._model.matcher(schema) if schema else None,
            ids=list(request.prompt_ids),
            adapter=batch.parameters.get("adapter", ""),
        )
        if len(item.partials) < item.partials_received:
            # The chunks were too large to be passed on. They are generated again, and are equal, but not sent again.
            sequence.skip_chunks = item.partials_received
        else:
            sequence.resume(read_before(item.partials, batch.content_type))
        if (token := max(sequence.ids)) >= self._model.vocabulary:
            raise BadInputError(
                f"token {token} is unknown to the model, which has {self._model.vocabulary}: leave it out"
            )
        if sequence.finish_reason is not None:
            # The previous attempt was lost between its last chunk and its result.
            sequence.succeed()
            return
        self._runner.run(sequence)
