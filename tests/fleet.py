"""A real fleet for tests: a master and workers as processes, which a test can kill and start again.

A process started here gets SIGKILL from the kernel when the test's process dies, so that nothing is left behind. Logs
are kept in files; when a test fails, what its fleet wrote is in pytest's captured output.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import multigpu
from grpc_health.v1 import health_pb2, health_pb2_grpc
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import (
    admin_service_pb2_grpc,
    task_pb2,
    task_service_pb2,
    task_service_pb2_grpc,
    worker_service_pb2_grpc,
)

from tests.waiting import until as until  # noqa: PLC0414  other tests import it from here

HERE = Path(__file__).resolve().parent
HANDLERS = HERE / "integration" / "handlers"
READY_TIMEOUT_S = 60.0
# A busy host may delay heartbeats: workers must not be lost for that. A killed worker is noticed by its stream.
PATIENT = ("--heartbeat-interval-s", "0.2", "--session-timeout-s", "5", "--reconnect-grace-s", "3")
# For tests of silent workers.
QUICK = ("--session-timeout-s", "1", "--reconnect-grace-s", "1")


class Daemon:
    """A process and its log."""

    def __init__(
        self, module: str, flags: Sequence[str], log: Path, env: Mapping[str, str], prefix: Sequence[str] = ()
    ) -> None:
        self.log_path = log
        self._begin = log.stat().st_size if log.exists() else 0
        argv = [sys.executable, "-m", module, *flags]
        # The kernel ends it with this process. Not by preexec_fn: a fork beside gRPC's threads may hang.
        if (setpriv := shutil.which("setpriv")) is not None:
            argv = [setpriv, "--pdeathsig", "KILL", *argv]
        argv = [*prefix, *argv]  # a command that executes the rest
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MGPU_")} | dict(env)
        with log.open("ab") as file:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def log(self) -> str:
        """What this process wrote; its predecessors wrote to the same file."""
        return self.log_path.read_bytes()[self._begin :].decode("utf-8", "replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its log lines of that name."""
        found = []
        for line in self.log().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") == name:
                    found.append(event)
        return found

    def children(self) -> list[int]:
        """The pids of its children: for a worker, its engine's."""
        try:
            return [int(p) for p in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        except OSError:
            return []

    def signal(self, number: int) -> None:
        if self.alive:
            self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self.signal(signal.SIGKILL)
        self.process.wait(READY_TIMEOUT_S)

    def stop(self, timeout_s: float = 15.0) -> int:
        """SIGTERM; its exit code. TimeoutExpired: it did not end in time."""
        self.signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


class Fleet:
    """See the module. `folder` holds the logs and, unless `data_dir` says otherwise, the journal."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 2,
        master_flags: Sequence[str] = (),
        worker_flags: Sequence[str] = (),
        handlers: Sequence[str] = (),
        handlers_dir: Path = HANDLERS,
        data_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self._prefix = prefix
        folder.mkdir(parents=True, exist_ok=True)
        self.data_dir = data_dir or folder / "data"
        self.master: Daemon
        self.workers: dict[str, Daemon] = {}
        self.address = ""
        self._names = [f"w{i}" for i in range(workers)]
        self._master_flags = [*PATIENT, *master_flags]
        self._worker_flags = ["--drain-timeout-s", "2", "--cancel-grace-s", "1", *worker_flags]
        for module in handlers:
            self._worker_flags += ["--handlers", module]
        path = os.pathsep.join(filter(None, [str(handlers_dir), os.environ.get("PYTHONPATH", "")]))
        self._env = {**(env or {}), "PYTHONPATH": path}
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        try:
            self.start_master()
            for name in self._names:
                self.start_worker(name)
            self.wait_for_workers(*self._names)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes, and prints the logs, which pytest shows if the test failed."""
        if self._channel is not None:
            self._channel.close()
        daemons = [d for d in (*self.workers.values(), getattr(self, "master", None)) if d is not None]
        for daemon in daemons:
            daemon.signal(signal.SIGKILL)
        for daemon in daemons:
            daemon.process.wait(READY_TIMEOUT_S)
        if "PYTEST_CURRENT_TEST" in os.environ:
            for path in sorted(self.folder.glob("*.log")):
                print(f"--- {path.name}\n{path.read_text('utf-8', 'replace')[-8000:]}")

    def faults(self) -> list[str]:
        """Log lines that only a defect explains, whatever happens to the fleet from outside."""
        found = []
        for path in sorted(self.folder.glob("*.log")):
            for line in path.read_text("utf-8", "replace").splitlines():
                if "Traceback" in line or '"level": "critical"' in line:
                    found.append(f"{path.name}: {line}")
        return found

    def run_from(self, tree: Path) -> None:
        """Daemons that are started from now on run the code of this checkout."""
        packages = [str(tree / name) for name in ("client", "master", "worker")]
        self._env["PYTHONPATH"] = os.pathsep.join([*packages, self._env["PYTHONPATH"]])

    # --- processes ---------------------------------------------------------------------------------------------------

    def launch(self, name: str, module: str, arguments: Sequence[str]) -> Daemon:
        """Starts a daemon's process. Chaos runs override this."""
        return Daemon(
            module, [*arguments, "--log-format", "json"], self.folder / f"{name}.log", self._env, self._prefix
        )

    def start_master(self, *flags: str, wait: bool = True) -> Daemon:
        """Starts the master: on any port the first time, on the same one from then on."""
        listen = self.address or "127.0.0.1:0"
        arguments = ["--listen", listen, "--data-dir", str(self.data_dir), *self._master_flags, *flags]
        self.master = self.launch("master", "multigpu_master.main", arguments)
        if wait:
            self.wait_for_master()
        return self.master

    def wait_for_master(self) -> dict[str, Any]:
        """The master's log line that says that it is ready."""
        master = self.master

        def ready() -> dict[str, Any] | None:
            assert master.alive, f"the master ended with {master.process.returncode}: {master.log()}"
            return next(iter(master.events("master ready")), None)

        event = until(ready, READY_TIMEOUT_S, "the master")
        self.address = str(event["address"])
        return event

    def restart_master(self, *flags: str) -> None:
        """kill -9 and a new one, on the same port and data."""
        self.master.kill()
        self.start_master(*flags)

    def start_worker(self, name: str, *flags: str) -> Daemon:
        arguments = ["--master", self.address, "--device", "cpu", "--worker-id", name, *self._worker_flags, *flags]
        self.workers[name] = self.launch(name, "multigpu_worker.main", arguments)
        return self.workers[name]

    def wait_for_workers(self, *names: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until these workers are connected (default: all that were started)."""
        wanted = set(names or self.workers)

        def joined() -> bool:
            for name in wanted:
                daemon = self.workers[name]
                assert daemon.alive, f"worker {name} ended with {daemon.process.returncode}: {daemon.log()}"
            with contextlib.suppress(grpc.RpcError):
                return wanted <= {w.worker_id for w in self.list_workers() if w.state == admin_pb.WORKER_STATE_ACTIVE}
            return False

        until(joined, timeout_s, f"workers {sorted(wanted)}")

    # --- stubs -------------------------------------------------------------------------------------------------------

    @property
    def channel(self) -> grpc.Channel:
        """A channel that reconnects at once."""
        if self._channel is None:
            self._channel = grpc.insecure_channel(
                self.address,
                options=[
                    ("grpc.max_receive_message_length", 64 << 20),
                    ("grpc.max_send_message_length", 64 << 20),
                    ("grpc.initial_reconnect_backoff_ms", 50),
                    ("grpc.min_reconnect_backoff_ms", 50),
                    ("grpc.max_reconnect_backoff_ms", 200),
                ],
            )
        return self._channel

    @property
    def tasks(self) -> Any:
        return _untyped(task_service_pb2_grpc).TaskServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        return _untyped(admin_service_pb2_grpc).AdminServiceStub(self.channel)

    @property
    def sessions(self) -> Any:
        return _untyped(worker_service_pb2_grpc).WorkerServiceStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)

    def client(self, **options: Any) -> multigpu.Client:
        return multigpu.Client(self.address, **options)

    # --- calls that many tests make -----------------------------------------------------------------------------------

    def submit(self, kind: str, *payloads: bytes, request_ids: Sequence[str] = (), **spec: Any) -> list[int]:
        """Submits tasks by the raw stub; their ids. AssertionError: one was rejected."""
        answer = self.submit_raw(kind, *payloads, request_ids=request_ids, **spec)
        assert all(r.HasField("task_id") for r in answer.results), answer
        return [r.task_id for r in answer.results]

    def submit_raw(self, kind: str, *payloads: bytes, request_ids: Sequence[str] = (), **spec: Any) -> Any:
        """Submits tasks by the raw stub; the SubmitResponse."""
        names = request_ids or [""] * len(payloads)
        inputs = [task_pb2.TaskInput(payload=p, request_id=r) for p, r in zip(payloads, names, strict=True)]
        batch = task_pb2.TaskBatch(spec=task_pb2.TaskSpec(kind=kind, **spec), inputs=inputs)
        request = task_service_pb2.SubmitRequest(batches=[batch])
        return self.tasks.Submit(request, timeout=60, wait_for_ready=True)

    def get(self, task_id: int, wait_s: float = 0.0) -> Any:
        """The Task; after `wait_s` at most, if it has not ended before."""
        request = task_service_pb2.GetRequest(task_id=task_id)
        if wait_s:
            request.wait.FromNanoseconds(int(wait_s * 1e9))
        return self.tasks.Get(request, timeout=wait_s + 60, wait_for_ready=True).task

    def outcome(self, task_id: int, wait_s: float = 60.0) -> Any:
        """The outcome of a task. AssertionError: it has none yet."""
        task = self.get(task_id, wait_s)
        assert task.state == task_pb2.TASK_STATE_SETTLED, task
        return task.outcome

    def stats(self) -> Any:
        return self.admin.GetStats(admin_pb.GetStatsRequest(), timeout=60, wait_for_ready=True)

    def list_workers(self) -> list[Any]:
        return list(self.admin.ListWorkers(admin_pb.ListWorkersRequest(), timeout=60, wait_for_ready=True).workers)

    def worker(self, name: str) -> Any:
        """A worker as the master sees it."""
        return next(w for w in self.list_workers() if w.worker_id == name)

    def check_health(self, service: str) -> int:
        """Its ServingStatus. RpcError NOT_FOUND: the master knows no such name."""
        request = health_pb2.HealthCheckRequest(service=service)
        return int(self.health.Check(request, timeout=60, wait_for_ready=True).status)


@contextlib.contextmanager
def rejected(code: grpc.StatusCode, *texts: str) -> Iterator[None]:
    """Asserts that the call inside ends with this status, and a message that contains these texts."""
    try:
        yield
    except grpc.RpcError as error:
        assert error.code() is code, error
        for text in texts:
            assert text in error.details(), error.details()
    else:
        raise AssertionError(f"the call was answered; {code} was expected")


def _untyped(module: Any) -> Any:
    """The generated service stubs carry no types."""
    return module
