"""AdminService: workers, strategies, queues, the circuit breaker and statistics."""

import asyncio
import time
from typing import Any

import grpc
from multigpu.v1 import admin_service_pb2 as pb
from multigpu.v1 import task_pb2

from multigpu_master.core import events as ev
from multigpu_master.core.admission import QUEUES_MAX
from multigpu_master.core.model import Queue, Task, Worker
from multigpu_master.core.placement.explain import explain
from multigpu_master.core.usage import UsageSums
from multigpu_master.driver import Driver
from multigpu_master.errors import CallError, ExhaustedError, InvalidArgumentError, NotFoundError, PreconditionError
from multigpu_master.journal.protocol import USAGE_INTERVAL_S, OutcomeFilter, StoredOutcome, UsageKey
from multigpu_master.rpc import queries
from multigpu_master.rpc.admin.dead_letters import DeadLetterCalls
from multigpu_master.rpc.admin.models import ModelCalls
from multigpu_master.rpc.admin.saving import save
from multigpu_master.rpc.admin.tokens import TokenCalls
from multigpu_master.rpc.requests import NAME_PREFIX, page_of, parse_name_token, read_page_size
from multigpu_master.security.auth import Auth, caller_queues
from multigpu_master.settings import STRATEGY, breaker_setting, queue_setting, worker_setting
from multigpu_master.strategies.registry import canonical_name
from multigpu_master.wire.times import duration, seconds_of, set_time, timestamp
from multigpu_master.wire.validation import NAME_BYTES_MAX, check_printable, check_size
from multigpu_master.wire.workers import worker_message

# WatchWorkers: the pause between two rounds of changes, and the most workers in one message.
WATCH_INTERVAL_S = 0.25
WATCH_CHUNK = 64
# A page of ListWorkers ends once its workers exceed this size. One worker takes up to 256 KiB.
PAGE_BYTES = 4 << 20
# GetUsage begins this long before its end, unless the call gives a begin_time.
USAGE_S = 86_400.0
_USAGE_FIELDS = {
    pb.USAGE_KEY_QUEUE: "queue", pb.USAGE_KEY_SUBMITTER: "submitter",
    pb.USAGE_KEY_KIND: "kind", pb.USAGE_KEY_MODEL: "model",
}  # fmt: skip
_COUNTERS = (
    "submitted", "succeeded", "failed", "cancelled", "expired", "dead_lettered", "requeued", "stale_reports",
)  # fmt: skip


class AdminService(TokenCalls, ModelCalls, DeadLetterCalls):
    """See protos/multigpu/v1/admin_service.proto."""

    def __init__(self, driver: Driver, version: str, auth: Auth | None = None) -> None:
        self._driver = driver
        self._auth = auth
        self._core = driver.core
        self._version = version
        self._start_s = driver.now()
        self._busy_dead_letters = set()

    # --- workers -----------------------------------------------------------------------------------------------------

    async def ListWorkers(self, request: Any, _context: Any) -> pb.ListWorkersResponse:
        size = read_page_size(request.page_size)
        after = parse_name_token(request.page_token)
        known = self._core.fleet.workers
        workers = [known[worker_id] for worker_id in sorted(known) if worker_id > after]
        response = pb.ListWorkersResponse()
        size_bytes = 0
        async for worker in queries.pausing(workers[:size]):
            if size_bytes > PAGE_BYTES:
                break
            message = worker_message(worker)
            size_bytes += message.ByteSize()
            response.workers.append(message)
        if len(response.workers) < len(workers):
            response.next_page_token = f"{NAME_PREFIX}{response.workers[-1].worker_id}"
        return response

    async def WatchWorkers(self, _request: Any, context: Any) -> None:
        workers = self._core.fleet.workers
        sent: dict[str, tuple[Worker, int]] = {}
        while True:
            changed = self._driver.changes.workers
            response = pb.WatchWorkersResponse(removed_worker_ids=[i for i in sent if i not in workers])
            for worker_id in response.removed_worker_ids:
                del sent[worker_id]
            for worker in sorted(workers.values(), key=lambda w: w.worker_id):
                current = worker, worker.change_count
                if sent.get(worker.worker_id) != current:
                    sent[worker.worker_id] = current
                    response.workers.append(worker_message(worker))
                    if len(response.workers) == WATCH_CHUNK:
                        await context.write(response)  # other calls run meanwhile
                        response = pb.WatchWorkersResponse()
            await context.write(response)
            # Every heartbeat is a change. During this pause, the changes of a large fleet collect for the next round.
            await asyncio.sleep(WATCH_INTERVAL_S)
            await changed.wait()

    async def CordonWorker(self, request: Any, _context: Any) -> pb.CordonWorkerResponse:
        event = ev.Cordon(request.worker_id, request.reason[:1024])
        return pb.CordonWorkerResponse(worker=await self._change_worker(request.worker_id, event))

    async def UncordonWorker(self, request: Any, _context: Any) -> pb.UncordonWorkerResponse:
        event = ev.Uncordon(request.worker_id)
        return pb.UncordonWorkerResponse(worker=await self._change_worker(request.worker_id, event))

    async def DrainWorker(self, request: Any, _context: Any) -> pb.DrainWorkerResponse:
        deadline_s = None
        if request.HasField("timeout"):
            timeout_s = seconds_of(request.timeout)
            if timeout_s < 0:
                raise InvalidArgumentError(f"timeout is {timeout_s:g} s; it can't be negative")
            deadline_s = self._driver.now() + timeout_s
        event = ev.Drain(request.worker_id, deadline_s)
        return pb.DrainWorkerResponse(worker=await self._change_worker(request.worker_id, event))

    async def ForgetWorker(self, request: Any, _context: Any) -> pb.ForgetWorkerResponse:
        worker = self._known_worker(request.worker_id)
        if worker.session:
            raise PreconditionError(f"worker {request.worker_id!r} is connected; stop its daemon first")
        self._driver.handle(ev.Forget(request.worker_id))
        await save(self._driver, dict.fromkeys(worker_setting(worker)))
        return pb.ForgetWorkerResponse()

    async def CheckWorker(self, request: Any, _context: Any) -> pb.CheckWorkerResponse:
        worker = self._known_worker(request.worker_id)
        if not worker.session:
            raise PreconditionError(f"worker {request.worker_id!r} is lost: its device can't be checked")
        # The next check's number must be above `health.checks_passed`, which is not known before the first heartbeat.
        if not worker.health_reported:
            why = f"worker {request.worker_id!r} has just connected, and has not reported its health yet"
            raise CallError(f"{why}; try again in a moment", grpc.StatusCode.UNAVAILABLE)
        message = await self._change_worker(request.worker_id, ev.CheckDevice(request.worker_id))
        return pb.CheckWorkerResponse(worker=message, check=worker.requested_check)

    async def ReloadHandlers(self, request: Any, _context: Any) -> pb.ReloadHandlersResponse:
        worker = self._known_worker(request.worker_id)
        if not worker.session or worker.engine.handlers is None:
            why = "has no handlers, or a version of multigpu that can't reload them" if worker.session else "is lost"
            raise PreconditionError(f"worker {request.worker_id!r} {why}")
        self._driver.workers.reload_handlers(worker.session)
        return pb.ReloadHandlersResponse(worker=worker_message(worker))

    async def _change_worker(self, worker_id: str, event: ev.Event) -> pb.Worker:
        """Handles the event and saves the worker's settings. Returns the worker, even if it was forgotten meanwhile."""
        worker = self._known_worker(worker_id)
        self._driver.handle(event)
        await save(self._driver, worker_setting(worker))
        return worker_message(worker)

    # --- strategy and queues -----------------------------------------------------------------------------------------

    async def GetStrategy(self, request: Any, _context: Any) -> pb.GetStrategyResponse:
        core = self._core
        queues = caller_queues()
        visible = queues is None or request.queue in queues
        queue = (core.ledger.queues.get(request.queue) if visible else None) or Queue(request.queue)
        response = pb.GetStrategyResponse(
            strategy=core.ledger.strategy_of(queue).name, inherited=bool(request.queue) and not queue.strategy
        )
        for s in core.ledger.strategies.values():
            response.available.add(name=s.name, summary=s.summary, aliases=s.aliases)
        return response

    async def SetStrategy(self, request: Any, _context: Any) -> pb.SetStrategyResponse:
        core = self._core
        inherit = request.queue and not request.strategy
        name = "" if inherit else canonical_name(request.strategy, core.ledger.strategies)
        if name is None:
            names = ", ".join(sorted(core.ledger.strategies))
            raise InvalidArgumentError(f"no strategy {request.strategy!r}; there are: {names}")
        if request.queue:
            self._check_queue_allowed(request.queue)
        self._driver.handle(ev.SetStrategy(name, request.queue))
        if request.queue:
            await save(self._driver, queue_setting(core.ledger.queue(request.queue)))
            name = core.ledger.strategy_of(core.ledger.queue(request.queue)).name
        else:
            await save(self._driver, {STRATEGY: name.encode()})
        return pb.SetStrategyResponse(strategy=name)

    async def ListQueues(self, request: Any, _context: Any) -> pb.ListQueuesResponse:
        queues = caller_queues()
        found = {name for name, queue in self._core.ledger.queues.items() if not queue.idle}
        found |= self._driver.history.recent_queues()
        found.update(await asyncio.to_thread(self._driver.journal.dead_letter_queues))
        page, token = page_of(sorted(found if queues is None else queues & found), request)
        oldest_s = await queries.oldest_submits(self._core, page)
        return pb.ListQueuesResponse(queues=[self._queue_message(n, oldest_s) for n in page], next_page_token=token)

    def _queue_message(self, name: str, oldest_s: dict[str, float]) -> pb.Queue:
        queue = self._core.ledger.queues.get(name) or Queue(name)
        message = pb.Queue(
            queue=name,
            **{field: getattr(queue, field) for field in ("paused", "strategy", "queued", "queued_bytes", "leased")},
        )
        message.limits.tasks_max, message.limits.bytes_max = queue.tasks_max, queue.bytes_max
        message.end_rate, message.submit_rate = self._driver.history.rates(queue)
        if name in oldest_s:
            message.oldest_age.CopyFrom(duration(max(0.0, self._driver.now() - oldest_s[name])))
        return message

    async def PauseQueue(self, request: Any, _context: Any) -> pb.PauseQueueResponse:
        return pb.PauseQueueResponse(queue=await self._configure(ev.ConfigureQueue(request.queue, paused=True)))

    async def ResumeQueue(self, request: Any, _context: Any) -> pb.ResumeQueueResponse:
        queue = await self._configure(ev.ConfigureQueue(request.queue, paused=False))
        self._driver.history.restart_rates(self._core.ledger.queue(request.queue))
        return pb.ResumeQueueResponse(queue=queue)

    async def SetQueueLimits(self, request: Any, _context: Any) -> pb.SetQueueLimitsResponse:
        limits = request.limits
        event = ev.ConfigureQueue(request.queue, tasks_max=limits.tasks_max, bytes_max=limits.bytes_max)
        return pb.SetQueueLimitsResponse(queue=await self._configure(event))

    async def _configure(self, event: ev.ConfigureQueue) -> pb.Queue:
        if not event.queue:
            raise InvalidArgumentError('queue is missing; the usual one is "default"')
        self._check_queue_allowed(event.queue)
        self._driver.handle(event)
        await save(self._driver, queue_setting(self._core.ledger.queue(event.queue)))
        return self._queue_message(event.queue, await queries.oldest_submits(self._core, [event.queue]))

    def _check_queue_allowed(self, name: str) -> None:
        """Raises InvalidMessageError if the name is not allowed, and ExhaustedError if there are too many queues."""
        core = self._core
        check_printable("queue", name)
        check_size("queue", name, NAME_BYTES_MAX)
        if name not in core.ledger.queues and len(core.ledger.queues) >= QUEUES_MAX and not core.ledger.prune_queues():
            raise ExhaustedError(f"there are {QUEUES_MAX} queues with tasks or rules already; use one of them")

    # --- the circuit breaker -----------------------------------------------------------------------------------------

    async def ResetBreaker(self, request: Any, _context: Any) -> pb.ResetBreakerResponse:
        self._driver.handle(ev.ResetBreaker())
        await save(self._driver, breaker_setting(self._core.quarantine.breaker.tripped_s))
        return pb.ResetBreakerResponse(breaker=self._breaker_message())

    def _breaker_message(self) -> pb.Breaker:
        quarantine, now = self._core.quarantine, self._driver.now()
        breaker = quarantine.breaker
        message = pb.Breaker(
            tripped=bool(breaker.tripped_s),
            quarantines=breaker.count(now),
            quarantines_max=breaker.limit(quarantine.device_count(now)),
        )
        if breaker.tripped_s:
            set_time(message.trip_time, breaker.tripped_s)
        return message

    # --- statistics --------------------------------------------------------------------------------------------------

    async def GetStats(self, request: Any, _context: Any) -> pb.GetStatsResponse:
        core = self._core
        active = len(core.fleet.sessions)
        return pb.GetStatsResponse(
            version=self._version,
            start_time=timestamp(self._start_s),
            queued=core.ledger.unsettled - core.ledger.leased,
            leased=core.ledger.leased,
            **{name: getattr(core.ledger.counters, name) for name in _COUNTERS},
            workers_active=active,
            workers_lost=len(core.fleet.workers) - active,
            journal_bytes=self._driver.journal.size_bytes(),
            journal_writable=self._driver.write_buffer.writable,
            memory_bytes=queries.rss_bytes(),
            strategy=core.ledger.strategy,
            outcomes_retained=sum(
                (await asyncio.to_thread(self._driver.journal.count_outcomes, OutcomeFilter())).values()
            ),
            breaker=self._breaker_message(),
            worker_rejections=self._driver.workers.rejections.values(),
            # Read last, because count_outcomes takes time.
            server_time=timestamp(time.time()),
        )

    async def GetHistory(self, _request: Any, _context: Any) -> pb.GetHistoryResponse:
        return pb.GetHistoryResponse(points=self._driver.history.points)

    async def GetUsage(self, request: Any, _context: Any) -> pb.GetUsageResponse:
        now = self._driver.now()
        end_s = seconds_of(request.end_time) if request.HasField("end_time") else now
        begin_s = seconds_of(request.begin_time) if request.HasField("begin_time") else end_s - USAGE_S
        if end_s < begin_s:
            raise InvalidArgumentError("the period ends before it begins: begin_time is after end_time")
        group_by = dict.fromkeys(_USAGE_FIELDS.get(key, "") for key in request.group_by)
        if "" in group_by:
            raise InvalidArgumentError("group_by has a value that this master does not know")
        await self._driver.usage.flush()
        found = await asyncio.to_thread(self._driver.journal.usage, begin_s, end_s, list(group_by), caller_queues())
        interval_s = USAGE_INTERVAL_S
        return pb.GetUsageResponse(
            begin_time=timestamp(begin_s // interval_s * interval_s),
            end_time=timestamp(-(-end_s // interval_s) * interval_s),
            usage=[_usage_message(key, used) for key, used in found],
        )

    async def Explain(self, request: Any, _context: Any) -> pb.ExplainResponse:
        found: Task | StoredOutcome | None = self._core.ledger.tasks.get(request.task_id)
        if found is None:
            found = await asyncio.to_thread(self._driver.journal.get_outcome, request.task_id, whole=False)
        if found is None or not queries.may_see(found):
            raise NotFoundError(f"no task {request.task_id}: {queries.FORGOTTEN}")
        if isinstance(found, StoredOutcome):
            message = queries.stored_task(found, whole=False)
            state = task_pb2.OutcomeState.Name(message.outcome.state).removeprefix("OUTCOME_STATE_")
            why = f": {message.outcome.error.message}" if message.outcome.error.message else ""
            where = f" on {message.outcome.worker_id}" if message.outcome.worker_id else ""
            return pb.ExplainResponse(summary=f"{state}{where} after {message.attempts} attempt(s){why}", task=message)
        explanation = explain(self._core, found, self._driver.now())
        response = pb.ExplainResponse(
            summary=explanation.summary,
            strategy=explanation.strategy,
            task=queries.core_task(self._driver, found, whole=False),
        )
        if explanation.ahead is not None:
            response.ahead = explanation.ahead
        for c in explanation.candidates:
            response.candidates.add(
                worker_id=c.worker.worker_id,
                excluded_by=c.excluded_by,
                rank=c.rank,
                score=c.score,
                score_meaning=explanation.score_meaning,
            )
        return response


def _usage_message(key: UsageKey, used: UsageSums) -> pb.Usage:
    return pb.Usage(
        **key._asdict(),
        tasks_succeeded=used.succeeded,
        attempts_failed=used.failed_attempts,
        device_duration=duration(used.device_s),
        measured_duration=duration(used.measured_s),
        energy_joules=used.joules,
        energy_uncertainty_joules=used.uncertainty_joules,
    )
