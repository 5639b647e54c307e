"""The engine for tasks of kind "generate": text in, its continuation out, token by token.

The agent passes one task at a time to each slot. All slots pass their sequences to one scheduler (scheduler.py),
which runs them through the model together. `prepare` parses and tokenises; `run` waits until its sequence ends.

The text is sent in chunks. If an attempt is lost, the next one receives the chunks that the master has, runs them
through the model as part of the prompt, and continues with the next token. The answer is the same, because a token
depends only on the input, the seed and its position.

Messages: protos/multigpu/v1/generate.proto.
"""

from typing import TYPE_CHECKING, ClassVar

from multigpu_worker.engines.base import Batch, EngineSettings, Item, Reporter
from multigpu_worker.engines.common.failures import BadInputError, bad_input, check_parameters
from multigpu_worker.engines.common.precision import choose_for_torch
from multigpu_worker.engines.generate.payload import Request, read_before, read_request

if TYPE_CHECKING:
    from multigpu_worker.engines.generate.model import GenerateModel
    from multigpu_worker.engines.generate.scheduler import Scheduler


class GenerateEngine:
    """Generates text with one model."""

    one_by_one: ClassVar[bool] = True

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        (self._spec,) = settings.models.values()
        self._model: GenerateModel | None = None
        self._scheduler: Scheduler | None = None

    def load(self) -> dict[str, str]:
        """Load the model and run its trial."""
        from multigpu_worker.engines.common.torch_runtime import bind  # noqa: PLC0415 (takes seconds: torch)
        from multigpu_worker.engines.generate.model import load_model  # noqa: PLC0415 (as above)
        from multigpu_worker.engines.generate.scheduler import Scheduler  # noqa: PLC0415 (as above)

        precision = choose_for_torch(self._spec, self._settings)

        def set_up() -> None:
            bind(self._settings.threads, tf32=precision == "tf32")

        set_up()
        self._model = load_model(self._spec, self._settings, precision)
        self._scheduler = Scheduler(self._model, set_up)
        return {"engine": "torch", "precision": precision, **self._model.facts}

    def close(self) -> None:
        """End the scheduler's thread."""
        if self._scheduler is not None:
            self._scheduler.close()

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
            check_parameters(batch)
            model = self._model
            return read_request(item.payload, batch.content_type, model.tokenizer, model.context, item.task_id)
        except BadInputError as error:
            return error

    def _run(self, batch: Batch, item: Item, request: Request, reporter: Reporter) -> None:
        from multigpu_worker.engines.generate.sequence import Sequence  # noqa: PLC0415 (with the rest)
        from multigpu_worker.engines.generate.text import TextStream  # noqa: PLC0415 (with the rest)

        assert self._model is not None, "load comes first"
        assert self._scheduler is not None, "load comes first"
        schema = request.json_schema
        sequence = Sequence(
            item=item,
            reporter=reporter,
            request=request,
            content_type=batch.content_type,
            text=TextStream(self._model.decode, request.prompt_ids, request.stop),
            eos_ids=self._model.eos_ids,
            token_bytes=self._model.token_bytes,
            matcher=self._model.schemas.matcher(schema) if schema else None,
            ids=list(request.prompt_ids),
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
        self._scheduler.run(sequence)
