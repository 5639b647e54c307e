"""One answer that grows: its tokens, what was handed out of it, and how it ends.

A chunk leaves with each token that makes text; those that make none yet ride with the next. So where one chunk ends and
the next begins depends on the tokens alone, as the texts do: should all that was told be lost with a master, an attempt
that begins anew tells the same chunks again, and whoever has the first n of them goes on with the next.
"""

import threading
from dataclasses import dataclass, field

from multigpu.v1 import generate_pb2 as pb

from multigpu_worker.engines.base import Item, Reporter
from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.generate.payload import Before, Request, encode
from multigpu_worker.engines.generate.text import TextStream


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A task on its way. One thread at a time has it: the one that made it, then the scheduler's."""

    item: Item
    reporter: Reporter
    request: Request
    content_type: str
    text: TextStream
    eos_ids: frozenset[int]
    # The prompt's tokens and all that came since.
    ids: list[int]
    # The first so many are in the cache.
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    finish_reason: "pb.FinishReason | None" = None
    # Chunks that earlier attempts told, where nothing else is known of them: the same ones are not told again.
    untold: int = 0
    # Its place among all that ever came.
    arrival: int = 0
    begun: bool = False
    # A step with it and others broke: it has the next one by itself.
    doubted: bool = False
    # Settled, cancelled or failed: the thread that waits may go.
    over: threading.Event = field(default_factory=threading.Event)
    # What ended it where its engine is at fault.
    error: BaseException | None = None
    # Up to which of `ids` chunks have told; and whether they told the seed.
    _told: int = 0
    _seed_told: bool = False

    def __post_init__(self) -> None:
        self._told = len(self.ids)

    @property
    def generated(self) -> list[int]:
        return self.ids[len(self.request.prompt_ids) :]

    def resume(self, before: Before) -> None:
        """Go on where earlier attempts ended. Raises BadInputError: what they said can't have come from here."""
        for token in before.token_ids:
            if self.finish_reason is not None:
                raise BadInputError("the answer so far goes on after its end: the model is not the one that began it")
            self._add(token)
        said = self.text.text if self.finish_reason is not None else self.text.take(ended=False)
        if said != before.text:
            raise BadInputError("the answer so far is not this model's: the model is not the one that began it")
        self._told = len(self.ids)
        self._seed_told = before.seed_told

    def take(self, token: int) -> None:
        """One token more; tells the caller what text it makes."""
        self._add(token)
        ended = self.finish_reason is not None
        piece = self.text.take(ended=ended)
        if piece or ended:
            self._tell(piece)

    def _add(self, token: int) -> None:
        self.ids.append(token)
        count = len(self.ids) - len(self.request.prompt_ids)
        if token in self.eos_ids:
            self.finish_reason = pb.FINISH_REASON_STOP
        else:
            self.text.add(token)
            if self.text.stopped:
                self.finish_reason = pb.FINISH_REASON_STOP
        if self.finish_reason is None and count >= self.request.tokens_max:
            self.finish_reason = pb.FINISH_REASON_LENGTH
        if self.finish_reason is not None:
            self.text.finish()
            if self.text.stopped:
                self.finish_reason = pb.FINISH_REASON_STOP

    def _tell(self, piece: str) -> None:
        if self.untold:
            self.untold -= 1
        else:
            chunk = pb.GenerateChunk(text=piece, token_ids=self.ids[self._told :])
            if self.request.seed_drawn and not self._seed_told:
                chunk.seed = self.request.sampling.seed
            self.reporter.partial(self.item, encode(chunk, self.content_type), self.content_type)
        self._told = len(self.ids)
        self._seed_told = True

    def succeed(self) -> None:
        """Settle: it has ended by itself."""
        assert self.finish_reason is not None
        result = pb.GenerateResult(
            text=self.text.text,
            token_ids=self.generated,
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.request.prompt_ids),
        )
        self.reporter.succeed(self.item, encode(result, self.content_type), self.content_type)
