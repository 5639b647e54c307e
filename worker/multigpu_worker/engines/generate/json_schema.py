"""Answers that match a JSON schema: which tokens may come next. llguidance does the parsing.

`Schemas` belongs to a model, `Matcher` to one sequence. A matcher receives each token of its answer, also the tokens of
earlier attempts, so its state depends on these tokens only.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multigpu_worker.engines.common.failures import BadInputError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Bits in a word of a mask.
WORD_BITS = 32
# Schemas are enforced as a whole or rejected, even if they contain `x-guidance`. Whitespace is bounded, because a small
# model may write nothing else until max_tokens.
OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}",
}


class Matcher:
    """The state of one answer. Used by one thread at a time."""

    def __init__(self, matcher: "LLMatcher", vocabulary: int) -> None:
        self._matcher = matcher
        # Length of a mask.
        self.words = -(-vocabulary // WORD_BITS)

    @property
    def error(self) -> str:
        """Why no token can follow, such as a limit of llguidance. Empty: none."""
        return _reason(self._matcher.get_error())

    @property
    def stopped(self) -> bool:
        """The answer is complete: only an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token: int) -> bool:
        """Add a token that is no end token. False: the schema does not allow it, or `error` says why."""
        return self._matcher.consume_token(token)

    def fill(self, words: Tensor) -> None:
        """Write the mask of the next token: bit n is set if token n may come. words: int32 [self.words], on the CPU."""
        assert words.dtype == torch.int32
        assert words.is_contiguous()
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())


class Schemas:
    """Makes the matchers of a model. Builds llguidance's tokenizer, which takes seconds, at the first one."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._lock = threading.Lock()
        self._built: LLTokenizer | None = None

    def matcher(self, schema: str) -> Matcher:
        """The matcher of an answer that has no token yet. Raises BadInputError."""
        built = self._build()
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 (few tasks need it)

        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)  # type: ignore[arg-type]
        except ValueError as error:
            raise _rejected(str(error)) from error
        # Errors end the answer, and are reported by it: llguidance need not print them.
        matcher = LLMatcher(built, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise _rejected(_reason(matcher.get_error()))
        return Matcher(matcher, built.vocab_size)

    def _build(self) -> "LLTokenizer":
        with self._lock:
            if self._built is None:
                last = max(self._tokenizer.get_vocab().values())
                eos_ids = sorted(token for token in self._eos_ids if token <= last)
                if not eos_ids:
                    raise BadInputError(
                        "the model has no end token, which json_schema needs: use another model, or leave json_schema "
                        "out"
                    )
                try:
                    from llguidance.hf import from_tokenizer  # noqa: PLC0415 (few tasks need it)

                    self._built = from_tokenizer(self._tokenizer, eos_token=eos_ids)
                except ImportError as error:
                    raise BadInputError(
                        "json_schema needs llguidance, which the worker lacks: install it with pip install "
                        "'multigpu[worker]', or leave json_schema out"
                    ) from error
                except ValueError as error:
                    raise BadInputError(
                        f"json_schema does not work with the model's tokenizer ({_reason(str(error))}): use "
                        "another model, or leave json_schema out"
                    ) from error
            return self._built


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens may come next, for some rows of the logits. Other rows are free."""

    rows: list[int]
    # int32 [len(rows), words], on the CPU. Tokens past its end may not come.
    words: Tensor

    def apply(self, logits: Tensor) -> None:
        """Set the logits [sequences, vocabulary] of other tokens to minus infinity."""
        words = self.words.to(logits.device)
        bits = (words.unsqueeze(-1) >> torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)) & 1
        allowed = bits.flatten(1)[:, : logits.shape[1]] != 0
        missing = logits.shape[1] - allowed.shape[1]
        if missing > 0:
            allowed = torch.nn.functional.pad(allowed, (0, missing))
        for row, its in zip(self.rows, allowed, strict=True):
            logits[row].masked_fill_(~its, float("-inf"))


def masks_of(matchers: Sequence[Matcher | None]) -> Masks | None:
    """The masks of the rows that have a matcher. All matchers are of one model. None: no row has one."""
    found = {row: matcher for row, matcher in enumerate(matchers) if matcher is not None}
    if not found:
        return None
    words = torch.zeros((len(found), max(matcher.words for matcher in found.values())), dtype=torch.int32)
    for at, matcher in enumerate(found.values()):
        matcher.fill(words[at])
    return Masks(list(found), words)


def _rejected(reason: str) -> BadInputError:
    return BadInputError(f"json_schema is no schema that the engine can enforce ({reason}): change the schema")


def _reason(message: str) -> str:
    """An error of llguidance on one line, without the parser's state, which follows it in angle brackets."""
    return " ".join(message.partition("\n<")[0].split())
