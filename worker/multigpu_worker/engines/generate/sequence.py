"""One sequence: its tokens, the chunks that were sent, and how it ends.

Each token that completes text sends a chunk; other tokens are part of the next chunk. So the bounds of chunks depend on
the tokens only: a new attempt makes the same chunks, and can skip the first n.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from multigpu.v1 import generate_pb2 as pb

from multigpu_worker.engines.base import Item, Reporter
from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.generate.json_schema import Matcher
from multigpu_worker.engines.generate.payload import Before, Request, encode
from multigpu_worker.engines.generate.sample import Choice
from multigpu_worker.engines.generate.text import TextStream


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A running task. It belongs to the thread that created it, and then to the scheduler's."""

    item: Item
    reporter: Reporter
    request: Request
    content_type: str
    text: TextStream
    eos_ids: frozenset[int]
    # The bytes of a token.
    token_bytes: Callable[[int], bytes]
    # None: the payload has no json_schema.
    matcher: Matcher | None
    # Tokens of the prompt and of the answer.
    ids: list[int]
    # The LoRA adapter that the task names.
    adapter: str = ""
    # One for each token of the answer, if the payload has logprobs.
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    # Number of tokens whose keys and values are in the cache.
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    finish_reason: "pb.FinishReason | None" = None
    # Number of chunks to generate but not send: earlier attempts have sent them, and their content is unknown here.
    skip_chunks: int = 0
    # Increases with each sequence.
    arrival: int = 0
    begun: bool = False
    # A step with several sequences failed: it has to run alone once.
    isolated: bool = False
    # Settled, cancelled or failed.
    over: threading.Event = field(default_factory=threading.Event)
    # The error that ended it, if the engine is at fault.
    error: BaseException | None = None
    # Number of `ids` that were sent, with the prompt.
    _sent: int = 0
    # Whether the seed was sent.
    _seed_sent: bool = False

    def __post_init__(self) -> None:
        self._sent = len(self.ids)

    @property
    def generated(self) -> list[int]:
        return self.ids[len(self.request.prompt_ids) :]

    def resume(self, before: Before) -> None:
        """Continue after the chunks of earlier attempts. Raises BadInputError if this model cannot have made them."""
        for token in before.token_ids:
            if self.finish_reason is not None:
                raise BadInputError("the answer so far goes on after its end: the model is not the one that began it")
            self._add(token)
        said = self.text.text if self.finish_reason is not None else self.text.take(ended=False)
        if said != before.text:
            raise BadInputError("the answer so far is not this model's: the model is not the one that began it")
        expected = [] if self.request.sampling.logprobs is None else before.token_ids
        if [logprob.token_id for logprob in before.logprobs] != list(expected):
            raise BadInputError("the answer so far lacks log probabilities: the engine is not the one that began it")
        self.logprobs = before.logprobs
        self._sent = len(self.ids)
        self._seed_sent = before.seed_sent

    def take(self, choice: Choice) -> None:
        """Add a token, and send the text that it completes."""
        self._add(choice.token)
        if choice.logprobs:
            first, *top = [self._logprob(*pair) for pair in choice.logprobs]
            first.top.extend(top)
            self.logprobs.append(first)
        ended = self.finish_reason is not None
        piece = self.text.take(ended=ended)
        if piece or ended:
            self._send(piece)

    def _logprob(self, token: int, logprob: float) -> pb.TokenLogprob:
        return pb.TokenLogprob(token_id=token, logprob=logprob, token=self.token_bytes(token))

    def _add(self, token: int) -> None:
        self.ids.append(token)
        count = len(self.ids) - len(self.request.prompt_ids)
        if token in self.eos_ids:
            self.finish_reason = pb.FINISH_REASON_STOP
        else:
            if self.matcher is not None:
                self._match(self.matcher, token)
            self.text.add(token)
            if self.text.stopped or (self.matcher is not None and self.matcher.stopped):
                self.finish_reason = pb.FINISH_REASON_STOP
        if self.finish_reason is None and count >= self.request.max_tokens:
            self.finish_reason = pb.FINISH_REASON_LENGTH
        if self.finish_reason is not None:
            self.text.finish()
            if self.text.stopped:
                self.finish_reason = pb.FINISH_REASON_STOP

    def end(self, reason: "pb.FinishReason") -> None:
        """End it for another reason than its tokens, and send the rest of its text."""
        self.finish_reason = reason
        self.text.finish()
        self._send(self.text.take(ended=True))

    def _match(self, matcher: Matcher, token: int) -> None:
        if not matcher.accept(token):
            count = len(self.ids) - len(self.request.prompt_ids)
            raise BadInputError(
                f"token {count} of the answer can't be matched with json_schema ({matcher.error}): simplify the "
                "schema, and give all workers the same model"
            )

    def _send(self, piece: str) -> None:
        if self.skip_chunks:
            self.skip_chunks -= 1
        else:
            chunk = pb.GenerateChunk(text=piece, token_ids=self.ids[self._sent :])
            chunk.logprobs.extend(self.logprobs[self._sent - len(self.request.prompt_ids) :])
            if self.request.seed_drawn and not self._seed_sent:
                chunk.seed = self.request.sampling.seed
            self.reporter.partial(self.item, encode(chunk, self.content_type), self.content_type)
        self._sent = len(self.ids)
        self._seed_sent = True

    def succeed(self) -> None:
        """Settle a sequence that has ended."""
        assert self.finish_reason is not None
        result = pb.GenerateResult(
            text=self.text.text,
            token_ids=self.generated,
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.prompt_ids),
            logprobs=self.logprobs,
        )
        self.reporter.succeed(self.item, encode(result, self.content_type), self.content_type)
