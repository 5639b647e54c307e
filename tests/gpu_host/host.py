"""A simulated host: simulated GPUs, and a real fleet with a worker on each."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any, Self

from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import device_pb2, task_pb2, task_service_pb2

from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet, until

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HEALTHY = device_pb2.HEALTH_STATE_HEALTHY
# Folders of the handlers' module and of the modules that it imports.
PYTHON_PATH = f"{HERE / 'handlers'}{os.pathsep}{ROOT}"
# Eight workers with their engines start at once, possibly on two busy cores.
START_TIMEOUT_S = 120.0


class Host:
    """`n` GPUs, each with a worker: "gpu0", "gpu1" …. All workers are connected when the context begins."""

    def __init__(self, folder: Path, n: int = 8, *worker_flags: str) -> None:
        self.gpus = SimulatedGpus(folder / "gpus", n)
        self.names = [f"gpu{i}" for i in range(n)]
        handlers: dict[str, Any] = {"handlers": ["gpu_handlers"], "handlers_dir": Path(PYTHON_PATH)}
        self.fleet = Fleet(folder / "fleet", workers=0, env=self.gpus.env(), worker_flags=worker_flags, **handlers)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.fleet)
            for i in range(len(self.names)):
                self.start_worker(i)
            self.fleet.wait_for_workers(timeout_s=START_TIMEOUT_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def start_worker(self, i: int) -> None:
        self.fleet.start_worker(self.names[i], "--device", f"cuda:{i}")

    def make_good(self) -> None:
        """Repair every GPU, and reset the breaker."""
        for i in range(len(self.gpus)):
            if self.gpus.gpu(i).lost or self.gpus.gpu(i).recovery_action:
                self.gpus.return_(i)
            self.gpus.answer_(i)
        self.gpus.mend()
        until(self.all_healthy, 60, "eight healthy GPUs")
        self.reset_breaker()

    def reset_breaker(self) -> None:
        self.fleet.admin.ResetBreaker(admin_pb.ResetBreakerRequest(), timeout=20)

    # --- state --------------------------------------------------------------------------------------------------------

    def workers(self) -> dict[str, Any]:
        return {w.worker_id: w for w in self.fleet.list_workers()}

    def quarantined(self) -> set[str]:
        return {w.worker_id for w in self.workers().values() if w.quarantined}

    def all_healthy(self) -> bool:
        return all(w.health.state == HEALTHY and not w.quarantined for w in self.workers().values())

    def all_working(self) -> bool:
        return self.all_healthy() and all(self.engines().values())

    def codes(self, name: str) -> list[str]:
        """The codes of the reasons for a device's state of health."""
        return [reason.code for reason in self.workers()[name].health.reasons]

    def engines(self) -> dict[str, list[int]]:
        """Pids of the engine processes, by worker."""
        return {name: self.fleet.workers[name].children() for name in self.names}

    # --- tasks --------------------------------------------------------------------------------------------------------

    def submit(self, kind: str, count: int = 1, attempts_max: int = 0, **parameters: str) -> list[int]:
        return self.fleet.submit(kind, *[b""] * count, parameters=parameters, attempts_max=attempts_max)

    def outcomes(self, task_ids: list[int], timeout_s: float = 60.0) -> list[Any]:
        end_s = time.monotonic() + timeout_s
        return [self.fleet.outcome(i, max(1.0, end_s - time.monotonic())) for i in task_ids]

    def wait_until_used(self, *device_ids: str) -> None:
        """Submits work until each of these devices has done some: on a busy machine, others may do a round alone."""
        unused = set(device_ids)
        end_s = time.monotonic() + 60
        while unused:
            outcomes = self.outcomes(self.submit("gpu.work", 48, seconds="0.1"))
            assert all(outcome.state == task_pb2.OUTCOME_STATE_SUCCEEDED for outcome in outcomes), outcomes
            unused -= {outcome.device_id for outcome in outcomes}
            assert time.monotonic() < end_s, f"{unused} got no task"

    def leased(self, name: str) -> set[int]:
        """Tasks that a worker holds."""
        filter_ = task_service_pb2.TaskFilter(worker_id=name, states=[task_pb2.TASK_STATE_LEASED])
        request = task_service_pb2.ListRequest(filter=filter_, page_size=1000)
        return {task.task_id for task in self.fleet.tasks.List(request, timeout=20).tasks}
