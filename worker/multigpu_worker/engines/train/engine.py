"""The engine for tasks of kind "train": this rank of a job's script, as a process of its own.

torch.distributed.elastic starts the process, with the variables that torchrun sets; the engine of rank 0 has the store
where they meet. Unlike torchrun, the engine never starts it again: the master does that with all ranks of a job. What
the script writes becomes the task's log; what it reports (multigpu.train) becomes partial outputs of rank 0's task.
"""

import importlib
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from multigpu import _ranks
from multigpu._encoding import JSON
from multigpu._kinds.training import CHECKPOINTS_VARIABLE, FOLDER_VARIABLE, JOBS, REPORTS_VARIABLE, Job, read_payload
from multigpu.config.values import split_address

from multigpu_worker.engines.base import Batch, EngineSettings, Item, Reporter
from multigpu_worker.engines.finetune.settings import BAD_INPUT, OUT_OF_MEMORY
from multigpu_worker.engines.train.errors import ScriptError
from multigpu_worker.engines.train.events import Events
from multigpu_worker.engines.train.group import ScriptGroup, end_group
from multigpu_worker.engines.train.hang import HangWatch, await_notice, have_places, place_of, places, tell_place
from multigpu_worker.engines.train.tail import Tail
from multigpu_worker.engines.train.tuning import command_of

# Each poll takes time on a core that the ranks may need.
POLL_S = 0.25
# How long a script and what it has started may take to end after SIGTERM, before SIGKILL.
END_S = 3
TRACEBACK_LINES = 60
# What a script writes that fails because another rank has ended.
SIGNS_OF_A_LOST_RANK = ("gloo", "DistBackendError", "DistNetworkError", "NCCL", "Connection reset by peer")


class TrainEngine:
    one_by_one: ClassVar[bool] = True

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings

    def prepare(self, batch: Batch) -> object:
        return batch.items

    def run(self, batch: Batch, prepared: object, reporter: Reporter) -> None:
        del prepared
        place = _ranks.place_of(batch.parameters)
        for item in batch.items:
            if reporter.cancelled(item):
                continue
            reporter.begin(item)
            try:
                job = _job_of(item, batch)
                Rank(job, self._settings, place, item, reporter).run()
            except ScriptError as error:
                reporter.fail(
                    item, error.error_type, str(error), retryable=error.retryable, traceback=error.traceback
                )  # fmt: skip


def _job_of(item: Item, batch: Batch) -> Job:
    try:
        return read_payload(item.payload, batch.content_type)
    except ValueError as error:
        raise ScriptError("BadInput", str(error), retryable=False) from error


def script_of(folder: Path, job: Job) -> Path:
    """The script's path. Raises ScriptError if it is not a file in train_dir."""
    path = (folder / job.script).resolve()
    if not path.is_relative_to(folder.resolve()):
        message = f"the script {job.script} is not in the worker's train_dir, {folder}: put it there"
        raise ScriptError("BadInput", message, retryable=False)
    if not path.is_file():
        message = f"there is no script {path} on this host: copy it there, or share {folder} with the other hosts"
        raise ScriptError("BadInput", message, retryable=False)
    return path


class Rank:
    """One attempt of one rank."""

    def __init__(
        self, job: Job, settings: EngineSettings, place: _ranks.Place, item: Item, reporter: Reporter
    ) -> None:  # fmt: skip
        self._job = job
        self._settings = settings
        self._folder = folder = Path(settings.train_dir) / JOBS / job.name
        self._place = place
        self._item = item
        self._reporter = reporter
        run = f"{item.attempt}-{place.run_id or item.lease_id}"
        self._logs = folder / "logs" / run / f"rank-{place.rank}"
        self._stdout, self._stderr = Tail(Path(), skips=True), Tail(Path(), skips=True)
        self._reports = Tail(self._logs / "reports.jsonl")
        self._output: list[str] = []  # the last lines of stdout
        self._errors: list[str] = []  # and of stderr
        self._events: Events | None = None
        self._watch: HangWatch | None = None
        self._ended = False  # by itself

    def run(self) -> None:
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            if self._place.rank == 0:
                self._events = Events(self._folder / "events.jsonl", self._item, self._reporter)
                self._events.begin(self._job.without_texts(), self._place.world_size, self._logs.parent)
            command, folder = self._command()
        except OSError as error:
            message = f"the job's folder can't be written: {error.strerror}: {error.filename}"
            raise ScriptError("FolderUnwritable", message, retryable=True) from error
        store, address = self._meet()
        begin_s = time.monotonic()
        shared = importlib.import_module("torch.distributed").PrefixStore("multigpu", store)
        if self._job.hang_timeout_s:
            self._watch = HangWatch(shared, self._job.hang_timeout_s)
        try:
            self._run(address, shared, command, folder)
        finally:
            del store, shared
        if self._reporter.cancelled(self._item):
            return
        result: dict[str, Any] = {"name": self._job.name, "folder": str(self._folder)}
        if self._events is not None:
            result |= self._events.last | {"seconds": round(time.monotonic() - begin_s, 3)}
        self._reporter.succeed(self._item, json.dumps(result).encode(), JSON)

    def _command(self) -> tuple[list[str], Path]:
        """The command that is this rank, and its working directory. OSError, ScriptError."""
        if self._job.finetune is not None:
            own = command_of(self._job, self._job.finetune, self._settings, self._item, self._folder, self._logs)
            return own, self._folder
        script = script_of(Path(self._settings.train_dir), self._job)
        return [sys.executable, "-u", str(script), *self._job.args], script.parent

    def _meet(self) -> tuple[Any, str]:
        """The store of this run, which rank 0 has, and its address."""
        try:
            distributed: Any = importlib.import_module("torch.distributed")
        except ImportError as error:
            raise ScriptError("MissingPackage", f"torch can't be imported: {error}", retryable=False) from error
        place = self._place
        if place.rank == 0:
            host = split_address(place.store)[0] if place.store else "127.0.0.1"
            store = _ranks.serve_store(host)
            address = f"[{host}]:{store.port}" if ":" in host else f"{host}:{store.port}"
            if place.store:
                _ranks.meet(place, lambda shared: shared.set("address", address))
        else:
            address = _ranks.meet(place, lambda shared: shared.get("address")).decode()
            store = distributed.TCPStore(*split_address(address), wait_for_workers=False)
        return store, address

    def _run(self, address: str, store: Any, command: list[str], folder: Path) -> None:
        """Runs the command in the folder."""
        elastic: Any = importlib.import_module("torch.distributed.elastic.multiprocessing")
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # of what is reported here
        # Else it handles the signals that end this process.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGINT"
        with ScriptGroup() as group:
            context = elastic.start_processes(
                name="rank",
                entrypoint=sys.executable,
                args={0: group.command(folder, command)},
                envs={0: self._environment(address)},
                logs_specs=elastic.DefaultLogsSpecs(log_dir=str(self._logs), redirects=elastic.Std.ALL),
            )
            self._stdout, self._stderr = (
                Tail(Path(files[0]), skips=True) for files in (context.stdouts, context.stderrs)
            )
            try:
                result = self._follow(context, store)
            finally:
                end_group(context.pids()[0], END_S)
                context.close(signal.SIGKILL, END_S)  # which only takes its exit code
                self._forward(last=True)
        if result is not None and result.is_failed():
            self._failed(result.failures[0])

    def _follow(self, context: Any, store: Any) -> Any:
        """Until the script has ended. Returns torch's result; None: the task was cancelled."""
        while not self._reporter.cancelled(self._item):
            result = context.wait(POLL_S, POLL_S)
            if result is not None and (result.is_failed() or self._all_have_ended(store)):
                return result
            self._forward()
            if self._watch is not None and self._watch.hangs():
                await_notice(store, self._place.rank, self._place.world_size)
                context.close(signal.SIGABRT, END_S)  # Python's faulthandler then writes its stack
                self._forward(last=True)
                self._hangs(store)
        return None

    def _all_have_ended(self, store: Any) -> bool:
        """Whether this rank's engine may end, as its script has: that of rank 0 has the store, which the others use."""
        place = self._place
        if not self._ended:
            self._ended = True
            tell_place(store, place.rank, "has ended")
        if place.rank or have_places(store, place.world_size):
            return True
        time.sleep(POLL_S)
        return False

    def _environment(self, address: str) -> dict[str, str]:
        """As torchrun sets it for a node with one process: this worker's device is the only one that it sees."""
        place, (host, port) = self._place, split_address(address)
        rank, size = str(place.rank), str(place.world_size)
        restarts = self._item.attempt - 1
        environment = {
            "LOCAL_RANK": "0", "RANK": rank, "GROUP_RANK": rank, "ROLE_RANK": rank, "ROLE_NAME": "default",
            "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": size, "GROUP_WORLD_SIZE": size, "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": host, "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts), "TORCHELASTIC_MAX_RESTARTS": str(max(restarts, 3)),
            "TORCHELASTIC_RUN_ID": self._job.name, "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "PYTHONFAULTHANDLER": "1",
            CHECKPOINTS_VARIABLE: self._job.checkpoints or str(self._folder / "checkpoints"),
            FOLDER_VARIABLE: str(self._folder), REPORTS_VARIABLE: str(self._logs / "reports.jsonl"),
        }  # fmt: skip
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = "1"
        return environment

    def _forward(self, *, last: bool = False) -> None:
        """Passes on what the script has written and reported since."""
        stdout, stderr = self._stdout.lines(last=last), self._stderr.lines(last=last)
        if stdout or stderr:
            self._output = [*self._output, *stdout][-TRACEBACK_LINES:]
            self._errors = [*self._errors, *stderr][-TRACEBACK_LINES:]
            self._reporter.log(self._item, "".join(f"{line}\n" for line in (*stdout, *stderr)))
            self._progress()
        for line in self._reports.lines(last=last):
            self._progress()
            if self._events is not None:
                self._events.reported(line)
        if last and self._events is not None:
            self._events.end()

    def _progress(self) -> None:
        self._reporter.beat()
        if self._watch is not None:
            self._watch.progress()

    def _hangs(self, store: Any) -> None:
        """Raises the ScriptError of a job without progress. That of rank 0 counts, which hears of all ranks."""
        place = self._place
        if not self._ended:
            tell_place(store, place.rank, place_of(self._errors))
        if place.rank:
            _ranks.wait_for_cause(lambda: self._reporter.cancelled(self._item))
        found = "; ".join(f"rank {rank} {where}" for rank, where in enumerate(places(store, place.world_size)))
        message = f"no rank has written or reported anything for {self._job.hang_timeout_s:g} s: {found}"
        retryable = self._item.attempt <= self._job.retries
        raise ScriptError("Hang", message, retryable=retryable, traceback="\n".join(self._errors))

    def _failed(self, failure: Any) -> None:
        """Raises the ScriptError of a process that has failed."""
        rank, code = self._place.rank, failure.exitcode
        written = "\n".join(self._errors)
        where = f"its log is in {self._stdout.path.parent}"
        # Native threads that still run when an exception ends Python may abort the process.
        raised = code == -signal.SIGABRT and "Traceback (most recent call last)" in written
        if code < 0 and not raised:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            out_of_memory = ": perhaps by the kernel, out of memory" if -code == signal.SIGKILL else ""
            message = f"rank {rank} was ended by {name}{out_of_memory}; {where}"
            raise ScriptError("ScriptKilled", message, retryable=True, traceback=written)
        if self._place.world_size > 1 and any(sign in written for sign in SIGNS_OF_A_LOST_RANK):
            _ranks.wait_for_cause(lambda: self._reporter.cancelled(self._item))
        why = _error_of(failure) or cause_in(self._errors, self._output)
        ended = "raised an error" if raised else f"ended with exit code {code}"
        message = f"rank {rank} {ended}{': ' if why else ''}{why}; {where}"
        retryable = self._item.attempt <= self._job.retries
        last = next(reversed(self._errors), f"exit code {code}, and nothing on stderr; {where}")
        if self._job.finetune is not None and code == OUT_OF_MEMORY:
            raise ScriptError("OutOfMemory", f"rank {rank}: {last}", retryable=True)
        if self._job.finetune is not None and code == BAD_INPUT:
            raise ScriptError("BadInput", last, retryable=False)
        raise ScriptError("ScriptFailed", message, retryable=retryable, traceback=written)


def cause_in(errors: list[str], output: list[str]) -> str:
    """The line that likely says why a script has ended: of its last traceback, else the last that is no warning."""
    plain = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in errors]  # torch's, once there is a process group
    begins = [index for index, line in enumerate(plain) if line.startswith("Traceback (most recent call last)")]
    if begins:
        after = [line for line in plain[begins[-1] + 1 :] if line.strip() and not line.startswith(" ")]
        return after[0] if after else ""
    told = [line for line in plain if line.strip() and not line.startswith(" ") and "Warning: " not in line]
    return next(reversed(told or [line for line in output if line.strip()]), "")


def _error_of(failure: Any) -> str:
    """What a script with torch's decorator `record` has left as the reason; "": nothing."""
    try:
        left: Mapping[str, Any] = json.loads(Path(failure.error_file).read_text("utf-8"))
    except (OSError, ValueError):
        return ""
    message = left.get("message", "")
    return str(message.get("message", "") if isinstance(message, Mapping) else message).partition("\n")[0]
