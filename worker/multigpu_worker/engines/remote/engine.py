"""The engine `remote`: another server runs the model, and this worker sends it the tasks.

So a server that speaks OpenAI's API, text-embeddings-inference's or KServe's gets the master's queue: its priorities,
durable batches, limits and dashboard. `concurrency` in model.toml is how many tasks it has at a time.

While the server does not answer, or has no room (429, 502, 503, 504), a task waits here and its request is sent again:
no attempt fails because of that, for as long as the task's run_timeout allows. An answer that breaks off is computed
again by the server; the task still has one result. Other errors of the server fail the attempt.
"""

import random
import time
from typing import ClassVar

import structlog

from multigpu_worker.engines.base import Batch, EngineSettings, Item, Reporter
from multigpu_worker.engines.common.failures import BadInputError, bad_input, check_parameters
from multigpu_worker.engines.remote.calls import Call, Embed, Generate, Infer, Rerank
from multigpu_worker.engines.remote.server import (
    POLL_S,
    RequestFailedError,
    Server,
    TaskCancelledError,
    UnavailableError,
)
from multigpu_worker.repository.model import ModelFolderError, ModelSpec

log = structlog.get_logger(__name__)

WAIT_FIRST_S, WAIT_MAX_S = 0.1, 5.0

CALLS: dict[str, type[Call]] = {"embed": Embed, "generate": Generate, "rerank": Rerank, "infer": Infer}


class RemoteEngine:
    """Runs the tasks of one model on a server."""

    one_by_one: ClassVar[bool] = True

    def __init__(self, settings: EngineSettings) -> None:
        (self._spec,) = settings.models.values()
        self._facts = {"engine": "remote", "server": self._spec.remote.url, "api": self._spec.remote.api}
        self._unavailable = False

    def load(self) -> dict[str, str]:
        """A server that does not answer yet is no error: tasks wait for it."""
        self._server = Server(self._spec, calls_max=1024)
        self._call = call_of(self._spec, self._server)
        try:
            self._facts |= self._call.check()
            self._facts["state"] = "answers"
        except UnavailableError as error:
            self._note(error)
        except RequestFailedError as error:
            raise ModelFolderError(f"{self._spec.remote.url}: {error}") from error
        return self._facts

    def close(self) -> None:
        self._server.close()

    def prepare(self, batch: Batch) -> object:
        return batch.items

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        del prepared
        for item in batch.items:
            if reporter.cancelled(item):
                continue
            reporter.begin(item)
            try:
                check_parameters(batch)
                self._run(batch, item, reporter)
            except TaskCancelledError:
                continue
            except BadInputError as error:
                bad_input(error).report(item, reporter)
            except RequestFailedError as error:
                error.failure.report(item, reporter)
            finally:
                self._call.forget(item)

    def _run(self, batch: Batch, item: Item, reporter: Reporter) -> None:
        wait_s = WAIT_FIRST_S
        while not reporter.cancelled(item):
            try:
                result, content_type = self._call.run(batch, item, reporter)
            except UnavailableError as error:
                self._note(error)
                self._wait(item, reporter, error.wait_s or wait_s * random.uniform(0.5, 1.0))  # noqa: S311  no secret
                wait_s = min(2 * wait_s, WAIT_MAX_S)
                continue
            if self._unavailable:
                self._unavailable, self._facts["state"] = False, "answers"
                log.info("the server answers again", url=self._spec.remote.url)
            reporter.succeed(item, result, content_type)
            return

    def _note(self, error: UnavailableError) -> None:
        self._facts["state"] = f"unavailable: {error}"
        if not self._unavailable:
            self._unavailable = True
            log.warning("the server is unavailable, its tasks wait", url=self._spec.remote.url, error=str(error))

    @staticmethod
    def _wait(item: Item, reporter: Reporter, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0 and not reporter.cancelled(item):
            reporter.beat()
            time.sleep(min(left_s, POLL_S))


def call_of(spec: ModelSpec, server: Server) -> Call:
    """Raises ModelFolderError: the server's API has nothing for this kind."""
    kind = CALLS[spec.kind]
    if spec.remote.api not in kind.apis:
        apis = " or ".join(kind.apis)
        raise ModelFolderError(f"{spec.folder}: the API {spec.remote.api} has nothing for {spec.kind}; use {apis}")
    return kind(spec, server)
