"""The soak's load: what clients do all day, each kind at its own slow pace, and an account of every answer.

Every task has a request_id that is noted before it is sent. Whoever asked must get one answer; and each of two readers
must see the outcome of each durable task once: one reads on for ever, one comes back again and again with its cursor.
"""

import asyncio
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from multigpu import AsyncClient, Input, MultigpuError, RejectedError
from multigpu.outcome import Outcome, OutcomeState

# How long outcomes are kept: short, so that there is something to forget.
RESULT_TTL_S = 30.0
# Attempts are charged to tasks whose worker is killed; none of these deserves to become a dead letter for it.
PATIENT: dict[str, Any] = {
    "attempts_max": 100, "backoff_initial_s": 0.05, "backoff_max_s": 0.2, "result_ttl_s": RESULT_TTL_S,
}  # fmt: skip
MIB = 1 << 20
BULK, GROUP, PARTS = 200, 50, 5
FINDINGS_MAX = 20
# How long answers are remembered, and how near to a master's death one may be missing from its disk, in seconds.
ANSWERS_S, UNSAFE_S = 10.0, 0.5
# Where tasks that end their engine may run: on workers that are killed anyway.
CHURNED = {"churned": "yes"}


@dataclass
class Account:
    """What was asked, what was answered, and what each reader has still to see."""

    readers: tuple[str, ...] = ("steady", "resuming")
    asked: int = 0
    answered: int = 0
    unanswered: dict[str, None] = field(default_factory=dict)
    duplicates: int = 0
    findings: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    unseen: dict[str, dict[str, None]] = field(default_factory=dict)
    # Withdrawn before anybody knew whether the master had them, or answered in the moment before the master died, when
    # an outcome need not be on its disk yet: they may be seen, once, or not.
    perhaps: dict[str, set[str]] = field(default_factory=dict)
    _ids: Iterator[int] = field(default_factory=itertools.count)
    _answers: deque[tuple[float, str]] = field(default_factory=deque)  # the latest: when, by the monotonic clock

    def __post_init__(self) -> None:
        self.unseen = {reader: {} for reader in self.readers}
        self.perhaps = {reader: set() for reader in self.readers}

    def ask(self, what: str, *, durable: bool = True) -> str:
        """A new request_id."""
        request_id = f"{what}-{next(self._ids)}"
        self.asked += 1
        self.unanswered[request_id] = None
        if durable:
            for unseen in self.unseen.values():
                unseen[request_id] = None
        return request_id

    def answer(self, state: OutcomeState, expected: OutcomeState, request_id: str) -> None:
        del self.unanswered[request_id]
        self.answered += 1
        self.outcomes[state.name] += 1
        now_s = time.monotonic()
        self._answers.append((now_s, request_id))
        while self._answers[0][0] < now_s - ANSWERS_S:
            self._answers.popleft()
        if state is not expected:
            self.find(f"{request_id} ended {state.name}, not {expected.name}")

    def withdraw(self, request_id: str) -> None:
        """Its caller gave up. It counts as answered."""
        del self.unanswered[request_id]
        self.answered += 1
        self._seen_perhaps(request_id)

    def master_died(self, at_s: float) -> None:
        """The master was killed then, by the monotonic clock."""
        for answered_s, request_id in self._answers:
            if abs(answered_s - at_s) < UNSAFE_S:
                self._seen_perhaps(request_id)

    def _seen_perhaps(self, request_id: str) -> None:
        for reader in self.readers:
            if self.unseen[reader].pop(request_id, 0) is None:
                self.perhaps[reader].add(request_id)

    def see(self, reader: str, outcome: Outcome) -> None:
        request_id = outcome.request_id
        if self.unseen[reader].pop(request_id, 0) is None:
            return
        if request_id in self.perhaps[reader]:
            self.perhaps[reader].discard(request_id)
            return
        self.duplicates += 1
        self.find(f"reader {reader} saw {request_id} ({outcome.state.name}) again")

    def find(self, what: str) -> None:
        """Something that should not be."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(what)
            print(f"FINDING: {what}", flush=True)

    def lost(self) -> dict[str, list[str]]:
        """By who misses them: the caller, or a reader."""
        missed = {"caller": self.unanswered, **{f"reader {name}": unseen for name, unseen in self.unseen.items()}}
        return {who: list(ids) for who, ids in missed.items() if ids}


class Load:
    """All of it; `stop` lets what is under way end."""

    def __init__(self, client: AsyncClient, account: Account, seed: int) -> None:
        self.client = client
        self.account = account
        self.dice = random.Random(seed)
        self.stopping = asyncio.Event()
        self._jobs: list[asyncio.Task[None]] = []
        self._readers: list[asyncio.Task[None]] = []

    def start(self) -> None:
        paces: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (1.0, self.bulk), (0.05, self.interactive), (0.1, self.ephemeral), (1.0, self.streamed), (2.0, self.group),
            (1.0, self.large), (2.0, self.cancelled), (3.0, self.given_up), (1.0, self.failing), (20.0, self.poison),
        ]  # fmt: skip
        self._jobs = [asyncio.ensure_future(self._paced(period_s, job)) for period_s, job in paces]
        self._readers = [asyncio.ensure_future(self._guarded(r)) for r in (self.read_on, self.read_again)]

    async def stop(self, timeout_s: float) -> None:
        """Returns when every caller has its answer and the readers have seen all, or the time is over."""
        self.stopping.set()
        _, late = await asyncio.wait(self._jobs, timeout=timeout_s)
        for _ in range(int(timeout_s * 10)):
            if not any(self.account.unseen.values()):
                break
            await asyncio.sleep(0.1)
        for job in (*late, *self._readers):
            job.cancel()
        await asyncio.gather(*self._jobs, *self._readers, return_exceptions=True)
        for request_id in dict.fromkeys(i for ids in self.account.lost().values() for i in ids[:5]):
            try:
                self.account.find(f"{request_id} is lost; the master says {await self.client.get(request_id)!r}")
            except MultigpuError as error:
                self.account.find(f"{request_id} is lost; the master says {error}")

    async def _paced(self, period_s: float, job: Callable[[], Awaitable[None]]) -> None:
        while not self.stopping.is_set():
            await asyncio.sleep(self.dice.expovariate(1 / period_s))
            await self._guarded(job)

    async def _guarded(self, job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except Exception as error:  # noqa: BLE001  whatever it is, it is a finding, and the rest goes on
            self.account.find(f"{getattr(job, '__name__', job)}: {type(error).__name__}: {error}")

    async def _run(self, kind: str, expected: OutcomeState, what: str, payload: bytes, **options: Any) -> None:
        durable = not options.get("ephemeral")
        request_id = self.account.ask(what, durable=durable)
        outcome = await self.client.run_outcome(kind, payload, request_id=request_id, **(PATIENT | options))
        self.account.answer(outcome.state, expected, request_id)
        if expected is OutcomeState.SUCCEEDED and outcome.result != payload:
            self.account.find(f"{request_id} has another result: {outcome.result[:40]!r}")

    # --- what succeeds -----------------------------------------------------------------------------------------------

    async def warm(self, n: int) -> None:
        """n tasks as fast as they go."""
        for _ in range(0, n, 50 * BULK):
            await self._guarded(lambda: self.bulk(50 * BULK))

    async def bulk(self, n: int = BULK) -> None:
        ids = [self.account.ask("bulk") for _ in range(n)]
        inputs = [Input(payload=i.encode().ljust(100), request_id=i) for i in ids]
        outcomes = self.client.map_outcomes("echo", inputs, **PATIENT)
        async with aclosing(outcomes):
            for sent in inputs:
                outcome = await anext(outcomes)
                self.account.answer(outcome.state, OutcomeState.SUCCEEDED, outcome.request_id)
                if outcome.result != sent.payload:
                    self.account.find(f"{sent.request_id} has the result of {outcome.result[:40]!r}")

    async def interactive(self) -> None:
        await self._run("echo", OutcomeState.SUCCEEDED, "single", b"x" * 100, priority=1)

    async def ephemeral(self) -> None:
        await self._run("echo", OutcomeState.SUCCEEDED, "ephemeral", b"x" * 100, ephemeral=True)

    async def large(self) -> None:
        await self._run("echo", OutcomeState.SUCCEEDED, "large", self.dice.randbytes(MIB))

    async def group(self) -> None:
        """Submit, then wait."""
        ids = [self.account.ask("group") for _ in range(GROUP)]
        inputs = [Input(payload=i.encode(), request_id=i) for i in ids]
        for request_id, answer in zip(ids, await self.client.submit_many("echo", inputs, **PATIENT), strict=True):
            if isinstance(answer, RejectedError):
                raise answer
            try:
                outcome = await answer.outcome(60)
            except TimeoutError:
                self.account.find(f"{request_id} had not ended after a minute")
                continue
            self.account.answer(outcome.state, OutcomeState.SUCCEEDED, request_id)

    async def streamed(self) -> None:
        request_id = self.account.ask("stream")
        parameters = {"count": str(PARTS), "seconds": "0.01"}
        numbers = []
        parts = self.client.stream("trial.stream", b"s", request_id=request_id, parameters=parameters, **PATIENT)
        async with aclosing(parts):
            async for part in parts:
                numbers.append(int(part.removeprefix(b"s-")))
        # Each attempt goes on after the parts of the one before, and begins with part 0.
        right = all(b in (a + 1, 0) for a, b in itertools.pairwise(numbers))
        if not (right and numbers[:1] == [0] and numbers[-PARTS:] == list(range(PARTS))):
            self.account.find(f"{request_id} came in the parts {numbers}")
        self.account.answer(OutcomeState.SUCCEEDED, OutcomeState.SUCCEEDED, request_id)

    # --- what does not -----------------------------------------------------------------------------------------------

    async def cancelled(self) -> None:
        """Cancel by the task's id."""
        request_id = self.account.ask("cancelled")
        parameters = {"seconds": "30"}
        await self.client.submit("sleep", b"x", request_id=request_id, parameters=parameters, **PATIENT)
        await asyncio.sleep(self.dice.uniform(0, 0.3))
        await self.client.cancel(request_id, reason="the soak's wish")
        task = await self.client.get(request_id, wait_s=60)
        assert task.outcome is not None, f"{request_id} goes on after it was cancelled"
        self.account.answer(task.outcome.state, OutcomeState.CANCELLED, request_id)

    async def given_up(self) -> None:
        """A caller that goes away."""
        request_id = self.account.ask("given-up")
        call = self.client.run("sleep", b"x", request_id=request_id, parameters={"seconds": "30"}, **PATIENT)
        with_timeout = asyncio.wait_for(call, self.dice.uniform(0.01, 0.3))
        try:
            await with_timeout
        except TimeoutError:
            self.account.withdraw(request_id)
        else:
            self.account.find(f"{request_id} slept 30 s in less than one")

    async def failing(self) -> None:
        parameters = {"mode": "raise", "retryable": "false"}
        await self._run("fail", OutcomeState.FAILED, "failing", b"", parameters=parameters)

    async def poison(self) -> None:
        """Ends every engine that takes it."""
        options: dict[str, Any] = {"parameters": {"mode": "exit"}, "labels": CHURNED, "attempts_max": 2}
        await self._run("fail", OutcomeState.DEAD_LETTERED, "poison", b"", **options)

    # --- who reads along ---------------------------------------------------------------------------------------------

    async def read_on(self) -> None:
        async for outcome, _ in self.client.watch():
            self.account.see("steady", outcome)

    async def read_again(self) -> None:
        """Reads for a few seconds, goes away, and comes back with the cursor."""
        cursor = ""
        while True:
            try:
                async with asyncio.timeout(self.dice.uniform(0.5, 5)), aclosing(self.client.watch(cursor=cursor)) as it:
                    async for outcome, then in it:
                        self.account.see("resuming", outcome)
                        cursor = then
            except TimeoutError:
                pass
