"""Continuous batching: which sequences go through the model in the next step.

One thread runs the steps. In each step, every running sequence contributes its next token or a part of its prompt, so a
long prompt does not delay the others. Waiting sequences join in order of arrival as soon as enough blocks for their
tokens are free, and leave when they end.

If blocks run out, the sequence that arrived last returns its blocks and waits again; when it rejoins, all its tokens
are computed again. The sequence that arrived first is never interrupted, so there is always progress. If memory runs
out, later steps have fewer tokens, or fewer blocks are in use.

If a step with several sequences fails, each of them runs alone once, and only one that fails alone fails its task. If
the device's context is lost, no step can run any more: the first sequence of the step fails with that error. Then the
agent ends the process. It reads from the slots which other tasks were running.
"""

import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from multigpu_worker.engines.common.cuda_errors import context_is_lost
from multigpu_worker.engines.common.failures import BadInputError
from multigpu_worker.engines.common.limits import Limit
from multigpu_worker.engines.common.torch_runtime import memory_errors
from multigpu_worker.engines.generate.cache import BlockPool, Piece, blocks_for
from multigpu_worker.engines.generate.json_schema import masks_of
from multigpu_worker.engines.generate.model import GenerateModel
from multigpu_worker.engines.generate.sample import Choice, sample_tokens
from multigpu_worker.engines.generate.sequence import Sequence

# Tokens of a step, at most: about as many as the device computes while it reads the weights once.
CPU_STEP_TOKENS = 64
GPU_STEP_TOKENS = 2048
# On a CPU, in a step with prompts only: a token takes a quarter less time in a step of 256 tokens than of 64.
CPU_PROMPT_TOKENS = 256
STEP_TOKENS_MIN = 16
# Steps that have to fit before a lowered limit is doubled. Many, because a step that does not fit is computed in vain
# and may interrupt sequences.
FITTED_STEPS_MIN = 1024


class Scheduler:
    """Runs sequences. Its thread calls `bind`, which prepares a thread for torch, before the first step."""

    def __init__(self, model: GenerateModel, bind: Callable[[], None]) -> None:
        self._model = model
        self._bind = bind
        self._pool = BlockPool(model.cache.blocks)
        on_cpu = model.device.type == "cpu"
        self._step_tokens = CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS
        # For a step with prompts only.
        self._prompt_budget = CPU_PROMPT_TOKENS if on_cpu else GPU_STEP_TOKENS
        self._step_tokens_full = self._step_tokens
        self._tokens_limit, self._blocks_limit = Limit(FITTED_STEPS_MIN), Limit(FITTED_STEPS_MIN)
        self._changed = threading.Condition()
        # Guarded by the condition. Only the scheduler's thread uses the other fields.
        self._arrived: list[Sequence] = []
        self._arrivals = 0
        self._closed = False
        # The device's context was lost: no step can run any more.
        self._lost = False
        # In order of arrival.
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._thread = threading.Thread(target=self._loop, name="generate", daemon=True)
        self._thread.start()

    def run(self, sequence: Sequence) -> None:
        """Run a sequence to its end. Raises the error that ended it, unless that was reported as the task's failure."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine was closed")
            self._arrivals += 1
            sequence.arrival = self._arrivals
            self._arrived.append(sequence)
            self._changed.notify()
        sequence.over.wait()
        if sequence.error is not None:
            raise sequence.error

    def close(self) -> None:
        """End the thread. Unfinished sequences raise in the threads that wait for them."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _loop(self) -> None:
        self._bind()
        while self._take_arrivals():
            try:
                self._step()
            except BaseException as error:  # noqa: BLE001  an error of the scheduler ends all sequences
                self._end_all(error)
        self._end_all(RuntimeError("the engine was closed"))

    def _take_arrivals(self) -> bool:
        """Wait for work. False: closed."""
        with self._changed:
            while not self._closed and (self._lost or not (self._arrived or self._waiting or self._running)):
                self._changed.wait()
            self._waiting.extend(self._arrived)
            self._arrived.clear()
            return not self._closed

    def _end_all(self, error: BaseException) -> None:
        for sequence in (*self._running, *self._waiting):
            sequence.error = error
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended."""
        self._free(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        sequence.over.set()

    def _free(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._running.remove(sequence)
            self._pool.give_back(sequence.blocks)
            sequence.blocks = []
            sequence.computed = 0

    def _step(self) -> None:
        for sequence in (*self._running, *self._waiting):
            if sequence.reporter.cancelled(sequence.item):
                self._leave(sequence)
            else:
                sequence.reporter.beat()
        self._admit()
        planned = self._plan()
        if not planned:
            return
        choices: list[Choice | None] = []
        shortage, failure = "", None
        wanted = [index for index, (sequence, piece) in enumerate(planned) if piece.end == len(sequence.ids)]
        try:
            with memory_errors():
                choices = self._compute([piece for _, piece in planned], [planned[i][0] for i in wanted], wanted)
        except MemoryError as error:
            shortage = str(error) or "MemoryError"
        except Exception as error:  # noqa: BLE001  any error of the model or of sampling
            failure = error
        # After the except clause, because until then the exception references the tensors of the step.
        if shortage:
            self._shrink(planned, shortage)
            return
        if failure is not None:
            self._isolate([sequence for sequence, _ in planned], failure)
            return
        self._prompt_budget = self._tokens_limit.fitted(self._prompt_budget)
        self._step_tokens = min(self._step_tokens_full, self._prompt_budget)
        self._pool.blocks_max = self._blocks_limit.fitted(self._pool.blocks_max)
        for sequence, piece in planned:
            sequence.computed = piece.end
            sequence.isolated = False
        for index, choice in zip(wanted, choices, strict=True):
            self._take(planned[index][0], choice)

    @torch.inference_mode()
    def _compute(self, pieces: list[Piece], sequences: list[Sequence], wanted: list[int]) -> list[Choice | None]:
        # A step with parts of prompts only needs no logits, but `forward` must be asked for at least one row.
        logits: Tensor = self._model.forward(pieces, wanted or [0])
        if not wanted:
            return []
        # On a GPU, the masks are computed while the device runs the step.
        masks = masks_of([each.matcher for each in sequences])
        samplings = [each.request.sampling for each in sequences]
        return sample_tokens(logits, samplings, [each.ids for each in sequences], masks)

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            # Blocks for one more token, so that the sequence makes at least one step before it is interrupted.
            count = blocks_for(min(len(sequence.ids) + 1, self._model.context))
            if not self._running:
                self._pool.blocks_max = max(self._pool.blocks_max, count)
            elif not self._pool.can_take(count):
                return
            self._waiting.popleft()
            sequence.blocks = self._pool.take(count)
            self._running.append(sequence)
            if not sequence.begun:
                sequence.begun = True
                sequence.reporter.begin(sequence.item)

    def _plan(self) -> list[tuple[Sequence, Piece]]:
        """The piece that each running sequence contributes to the next step. Earlier sequences get blocks first."""
        self._running.sort(key=lambda sequence: sequence.arrival)
        for sequence in list(self._running):
            if sequence in self._running:
                self._make_room(sequence)
        running = next(([each] for each in self._running if each.isolated), self._running)
        prefilling = sum(len(each.ids) - each.computed > 1 for each in running)
        others = len(running) - prefilling
        budget = max(prefilling, self._step_tokens - others if others else self._prompt_budget)
        planned = []
        for sequence in running:
            count = len(sequence.ids) - sequence.computed
            if count > 1:
                # An equal share for each sequence; the tokens that one does not need are shared by the next ones.
                count = min(count, max(1, budget // prefilling))
                prefilling -= 1
                budget -= count
            start = sequence.computed
            token_ids = sequence.ids[start : start + count]
            planned.append((sequence, Piece(token_ids=token_ids, start=start, blocks=sequence.blocks)))
        return planned

    def _make_room(self, sequence: Sequence) -> None:
        """Take the blocks that a sequence lacks. If too few are free, interrupt later sequences, or else this one."""
        missing = blocks_for(len(sequence.ids)) - len(sequence.blocks)
        while missing > 0 and not self._pool.can_take(missing):
            last = self._running[-1]
            if last is sequence and len(self._running) == 1:
                # A sequence that runs alone may use all blocks: blocks_max was lowered while several were running.
                self._pool.blocks_max = self._pool.used + missing
                break
            self._interrupt(last)
            if last is sequence:
                return
        if missing > 0:
            sequence.blocks += self._pool.take(missing)

    def _interrupt(self, sequence: Sequence) -> None:
        self._free(sequence)
        later = [at for at, other in enumerate(self._waiting) if other.arrival > sequence.arrival]
        self._waiting.insert(later[0] if later else len(self._waiting), sequence)

    def _take(self, sequence: Sequence, choice: Choice | None) -> None:
        try:
            if sequence.matcher is not None and sequence.matcher.error:
                message = f"no token can follow under json_schema ({sequence.matcher.error}): simplify the schema"
                sequence.error = BadInputError(message)
            elif choice is None:
                message = "the model's answer is not a number: try a wider precision, or check the model's files"
                sequence.reporter.fail(sequence.item, "NotANumber", message, retryable=False)
            else:
                sequence.take(choice)
                if sequence.finish_reason is None:
                    return
                sequence.succeed()
        except Exception as error:  # noqa: BLE001  an error of the tokenizer fails only this sequence
            sequence.error = error
        self._leave(sequence)

    def _isolate(self, sequences: list[Sequence], failure: Exception) -> None:
        """After a failed step: fail its only sequence, or have each of several run alone."""
        self._lost = context_is_lost(str(failure))
        if len(sequences) > 1 and not self._lost:
            for sequence in sequences:
                sequence.isolated = True
            return
        sequences[0].error = failure
        self._leave(sequences[0])

    def _shrink(self, planned: list[tuple[Sequence, Piece]], shortage: str) -> None:
        """After memory ran out: lower the limit of tokens, else of blocks; a sequence that does not fit alone fails."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        tokens = sum(len(piece.token_ids) for _, piece in planned)
        if tokens > max(STEP_TOKENS_MIN, len(planned)):
            self._prompt_budget = self._tokens_limit.lower(self._prompt_budget, max(STEP_TOKENS_MIN, tokens // 2))
            self._step_tokens = min(self._step_tokens, self._prompt_budget)
        elif len(planned) > 1:
            for sequence in self._running[len(self._running) // 2 :]:
                self._interrupt(sequence)
            self._pool.blocks_max = self._blocks_limit.lower(self._pool.blocks_max, self._pool.used)
        else:
            sequence = planned[0][0]
            message = (
                f"out of memory on one answer of {len(sequence.ids)} tokens: free memory on the device, "
                f"shorten the prompt, or use precision bf16 ({shortage})"
            )
            sequence.reporter.fail(sequence.item, "OutOfMemory", message, retryable=True)
            self._leave(sequence)
