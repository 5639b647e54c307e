"""AsyncAdminClient: what an operator does, for programs. mgpuctl is made of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from multigpu._sync.base import BaseClient
from multigpu.errors import InvalidRequestError
from multigpu.fleet import (
    Breaker,
    DeleteResult,
    Explanation,
    HealthState,
    HistoryPoint,
    ModelEntry,
    NewToken,
    Queue,
    RequeueResult,
    Role,
    Stats,
    Strategy,
    Token,
    UsageReport,
    Worker,
    WorkerState,
)
from multigpu.options import USAGE_KEYS, timestamp_of, to_proto_duration
from multigpu.task import Task
from multigpu.v1 import admin_service_pb2 as admin

if TYPE_CHECKING:
    from datetime import datetime

    from multigpu.outcome import TaskName


# A check imports torch at worst, and begins later if the device was sick a short time ago.
CHECK_TIMEOUT_S, CHECK_POLL_INTERVAL_S = 180.0, 0.2


class AdminClient(BaseClient):
    """Administers one master and its fleet. Takes the arguments of a client.

    Every call raises NotFoundError for a worker, model or token that the master does not know, InvalidRequestError for
    one that makes no sense or that the fleet's state does not allow, AccessError if the master requires an
    administrator's token, and UnavailableError or CallTimeoutError if it does not answer.
    """

    def stats(self) -> Stats:
        """The master and its work."""
        return Stats.of(self._core.admin("GetStats", admin.GetStatsRequest()))

    def history(self) -> list[HistoryPoint]:
        """The fleet's last hour, in points of ten seconds, oldest first."""
        response = self._core.admin("GetHistory", admin.GetHistoryRequest())
        return [HistoryPoint.of(each) for each in response.points]

    def usage(
        self, by: Collection[str] = ("queue",), *, begin: datetime | None = None, end: datetime | None = None
    ) -> UsageReport:
        """Device time and energy of tasks in a period, summed by these of "queue", "submitter" (the name of a token),
        "kind" and "model"; the largest device time first. `begin`: default 24 hours before `end`; `end`: default now.
        InvalidRequestError: the period ends before it begins. ValueError: `by` has another name, or an instant has no
        time zone.
        """
        if unknown := [name for name in by if name not in USAGE_KEYS]:
            raise ValueError(f"usage can't be summed by {unknown[0]!r}; use some of {', '.join(USAGE_KEYS)}")
        request = admin.GetUsageRequest(group_by=[f"USAGE_KEY_{name.upper()}" for name in by])
        if begin is not None:
            request.begin_time.CopyFrom(timestamp_of(begin))
        if end is not None:
            request.end_time.CopyFrom(timestamp_of(end))
        return UsageReport.of(self._core.admin("GetUsage", request))

    # Workers.

    def list_workers(self) -> list[Worker]:
        """Every worker that the master knows, by worker_id."""
        return [Worker.of(each) for each in self._rows("ListWorkers", admin.ListWorkersRequest(), "workers")]

    def cordon_worker(self, worker_id: str, *, reason: str = "") -> Worker:
        """Gives a worker no new tasks until it is uncordoned, also after restarts. `reason`: for display."""
        request = admin.CordonWorkerRequest(worker_id=worker_id, reason=reason)
        return Worker.of((self._core.admin("CordonWorker", request)).worker)

    def uncordon_worker(self, worker_id: str) -> Worker:
        """Ends a cordon or a drain."""
        request = admin.UncordonWorkerRequest(worker_id=worker_id)
        return Worker.of((self._core.admin("UncordonWorker", request)).worker)

    def drain_worker(self, worker_id: str, *, grace_s: float | None = None) -> Worker:
        """Gives a worker no new tasks, and after `grace_s` takes away those that it still has (default: never)."""
        request = admin.DrainWorkerRequest(worker_id=worker_id)
        if grace_s is not None:
            request.timeout.CopyFrom(to_proto_duration(grace_s))
        return Worker.of((self._core.admin("DrainWorker", request)).worker)

    def forget_worker(self, worker_id: str) -> None:
        """Removes a lost worker from the list. InvalidRequestError: it is connected."""
        self._core.admin("ForgetWorker", admin.ForgetWorkerRequest(worker_id=worker_id))

    def check_worker(self, worker_id: str, *, timeout: float = CHECK_TIMEOUT_S) -> Worker:
        """Has a worker check its device: the driver answers, an engine starts, and the self-test has the right result.

        The worker gets no tasks meanwhile. Returns it when its device has passed (`health.state` is HEALTHY or
        DEGRADED), when it has not (`health.reasons` say why, and the worker checks it again later), when the worker is
        lost, or after `timeout` seconds.
        """
        request = admin.CheckWorkerRequest(worker_id=worker_id)
        asked = self._core.admin("CheckWorker", request)
        worker, end_s = Worker.of(asked.worker), time.monotonic() + timeout
        while not _checked(worker, asked.check) and time.monotonic() < end_s:
            time.sleep(CHECK_POLL_INTERVAL_S)
            worker = next((each for each in self.list_workers() if each.worker_id == worker_id), worker)
        return worker

    def reload_handlers(self, worker_id: str) -> Worker:
        """Makes a worker read its handlers again, once the tasks in its engine are done. Returns at once: `handlers`
        of the worker counts reloads that ended.
        """
        request = admin.ReloadHandlersRequest(worker_id=worker_id)
        return Worker.of((self._core.admin("ReloadHandlers", request)).worker)

    def reset_breaker(self) -> Breaker:
        """Permits quarantines again, once the cause for which the breaker tripped is found."""
        return Breaker.of((self._core.admin("ResetBreaker", admin.ResetBreakerRequest())).breaker)

    # Strategies and queues.

    def get_strategy(self, queue: str = "") -> Strategy:
        """The strategy of a queue, or the fleet's, and those that there are."""
        return Strategy.of(self._core.admin("GetStrategy", admin.GetStrategyRequest(queue=queue)))

    def set_strategy(self, strategy: str, *, queue: str = "") -> str:
        """Sets the strategy of a queue, or the fleet's; returns its name. Empty, with a queue: the fleet's again."""
        request = admin.SetStrategyRequest(strategy=strategy, queue=queue)
        return str((self._core.admin("SetStrategy", request)).strategy)

    def list_queues(self) -> list[Queue]:
        """Queues with tasks, dead letters or settings, or of which a task ended in the last minute; by name."""
        return [Queue.of(each) for each in self._rows("ListQueues", admin.ListQueuesRequest(), "queues")]

    def pause_queue(self, queue: str) -> Queue:
        """Dispatches nothing of a queue until it is resumed, also after restarts. It still accepts tasks."""
        return Queue.of((self._core.admin("PauseQueue", admin.PauseQueueRequest(queue=queue))).queue)

    def resume_queue(self, queue: str) -> Queue:
        """Dispatches a paused queue again."""
        return Queue.of((self._core.admin("ResumeQueue", admin.ResumeQueueRequest(queue=queue))).queue)

    def set_queue_limits(self, queue: str, *, tasks_max: int = 0, bytes_max: int = 0) -> Queue:
        """Limits unsettled tasks and their payload bytes; more are rejected. 0: the master's limit."""
        limits = admin.QueueLimits(tasks_max=tasks_max, bytes_max=bytes_max)
        request = admin.SetQueueLimitsRequest(queue=queue, limits=limits)
        return Queue.of((self._core.admin("SetQueueLimits", request)).queue)

    # Tasks.

    def explain(self, task: TaskName, *, timeout: float | None = None) -> Explanation:
        """Why a task is where it is, by its task_id (int) or request_id (str)."""
        task_id = task if isinstance(task, int) else (self.get(task, timeout=timeout)).task_id
        return Explanation.of(self._core.explain(task_id, timeout))

    def list_dead_letters(self, queue: str = "") -> Generator[Task, None, None]:
        """Tasks that failed every attempt, the newest first. Default: of all queues."""
        rows = self._rows("ListDeadLetters", admin.ListDeadLettersRequest(queue=queue), "tasks")
        with closing(rows):
            for each in rows:
                yield Task(each, listed=True)

    def requeue_dead_letters(self, task_ids: Collection[int] = (), *, queue: str = "") -> RequeueResult:
        """Runs dead letters again under their ids, with the same input and all attempts: some, or all of a queue."""
        request = admin.RequeueDeadLettersRequest(task_ids=_some(task_ids, queue), queue=queue)
        merged = admin.RequeueDeadLettersResponse()
        for page in self._core.admin_pages("RequeueDeadLetters", request):
            merged.MergeFrom(page)
        merged.ClearField("next_page_token")
        return RequeueResult.of(merged)

    def delete_dead_letters(self, task_ids: Collection[int] = (), *, queue: str = "") -> DeleteResult:
        """Deletes dead letters with their input: some, or all of a queue."""
        request = admin.DeleteDeadLettersRequest(task_ids=_some(task_ids, queue), queue=queue)
        merged = admin.DeleteDeadLettersResponse()
        for page in self._core.admin_pages("DeleteDeadLetters", request):
            page.deleted += merged.deleted
            merged.MergeFrom(page)
        merged.ClearField("next_page_token")
        return DeleteResult.of(merged)

    # Models.

    def list_models(self, name: str = "") -> list[ModelEntry]:
        """Models that workers have offered since the master started, and where they are loaded. Default: all names."""
        rows = self._rows("ListModels", admin.ListModelsRequest(name=name), "models")
        return [ModelEntry.of(each) for each in rows]

    def load_model(self, model: str, worker_ids: Collection[str] = ()) -> list[str]:
        """Loads a model and keeps it loaded until it is unloaded. Returns the workers at once; `list_models` shows the
        progress. Default: on the worker with most free memory. ResourceExhaustedError: it does not fit.
        """
        request = admin.LoadModelRequest(model=model, worker_ids=worker_ids)
        return list((self._core.admin("LoadModel", request)).worker_ids)

    def unload_model(self, model: str, worker_ids: Collection[str] = ()) -> list[str]:
        """Makes workers unload a model once its tasks are done. Returns the workers. Default: all that have it."""
        request = admin.UnloadModelRequest(model=model, worker_ids=worker_ids)
        return list((self._core.admin("UnloadModel", request)).worker_ids)

    # Tokens: InvalidRequestError if the master runs without them.

    def create_token(
        self,
        name: str,
        roles: Collection[Role],
        *,
        queues: Collection[str] = (),
        worker_ids: Collection[str] = (),
        ttl_s: float | None = None,
        task_rate: float = 0.0,
        calls_max: int = 0,
    ) -> NewToken:
        """Makes an access token. Its `secret` can't be retrieved later. See Token for the parameters' meaning."""
        request = admin.CreateTokenRequest(
            name=name,
            roles=[admin.Role.Name(int(role)) for role in roles],
            queues=queues,
            worker_ids=worker_ids,
            task_rate=task_rate,
            calls_max=calls_max,
        )
        if ttl_s is not None:
            request.ttl.CopyFrom(to_proto_duration(ttl_s))
        return NewToken.of(self._core.admin("CreateToken", request))

    def list_tokens(self) -> list[Token]:
        """Every valid token, the oldest first."""
        return [Token.of(each) for each in self._rows("ListTokens", admin.ListTokensRequest(), "tokens")]

    def revoke_token(self, token_id: str) -> Token:
        """Ends a token, and every open call that uses it. Tasks that were submitted with it go on."""
        return Token.of((self._core.admin("RevokeToken", admin.RevokeTokenRequest(token_id=token_id))).token)

    def _rows(self, method: str, request: Any, field: str) -> Generator[Any, None, None]:
        with closing(self._core.admin_pages(method, request)) as pages:
            for page in pages:
                yield from getattr(page, field)


def _some(task_ids: Collection[int], queue: str) -> Collection[int]:
    if bool(task_ids) == bool(queue):
        raise InvalidRequestError("give either task_ids or a queue")
    return task_ids


def _checked(worker: Worker, check: int) -> bool:
    """Whether a check of its device has ended."""
    health = worker.health
    if worker.state is WorkerState.LOST or health is None:
        return worker.state is WorkerState.LOST
    return health.checks_passed >= check or (health.unusable and health.state is HealthState.SICK)
