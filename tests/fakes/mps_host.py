"""A host with simulated GPUs and the simulated MPS, where real workers run for a scripted master."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fakes.gpus import SimulatedGpus
from tests.worker.scripted_master import ScriptedMaster, Stream

FAKE = Path(__file__).resolve().parent / "mps_control"
PROGRAM = FAKE / "nvidia-cuda-mps-control"


class MpsWorker:
    """A real mgpu-worker."""

    def __init__(self, worker_id: str, gpu: int, process: asyncio.subprocess.Process, log: Path) -> None:
        self.worker_id = worker_id
        self.gpu = gpu
        self.process = process
        self.log_path = log
        self.stream: Stream

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def engine_pid(self) -> int:
        """Of its engine; 0: none runs now."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in path.read_text().split():
            with contextlib.suppress(OSError):
                if b"multigpu_worker.engine.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        return 0

    async def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()


class MpsHost:
    def __init__(self, gpus: int = 2) -> None:
        # Not pytest's folder: a socket's path is short.
        self.folder = Path(tempfile.mkdtemp(prefix="mps"))
        self.gpus = SimulatedGpus(self.folder / "gpus", n=gpus)
        self.pipes = self.folder / "m"
        self.master = ScriptedMaster()
        self.workers: list[MpsWorker] = []
        self._launched = 0
        self._streams: dict[str, Stream] = {}
        self.env = {
            **os.environ,
            **self.gpus.env(),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(FAKE), os.environ.get("PYTHONPATH", "")])),
        }
        self.env["PATH"] = f"{FAKE}{os.pathsep}{self.env['PATH']}"

    async def __aenter__(self) -> Self:
        await self.master.__aenter__()
        for gpu in range(len(self.gpus)):
            (self.pipe_dir(gpu) / "log").mkdir(parents=True)
            self.start_daemon(gpu)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            if worker.process.returncode is None:
                worker.process.kill()
                await worker.process.wait()
        for gpu in range(len(self.gpus)):
            if (self.pipe_dir(gpu) / "control").exists():
                with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
                    self.control(gpu, "quit")
        await self.master.__aexit__(kind, error, trace)
        if error is not None:
            for worker in self.workers:
                print(f"--- log of the worker of GPU {worker.gpu}\n{worker.log}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def device_id(self, gpu: int) -> str:
        return self.gpus.uuid(gpu)

    def pipe_dir(self, gpu: int) -> Path:
        return self.pipes / self.device_id(gpu)

    async def launch(self, gpu: int, *flags: str, **env: str) -> MpsWorker:
        """Start a worker, and wait for nothing."""
        worker_id = f"w{self._launched}"
        self._launched += 1
        log = self.folder / f"{worker_id}.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "multigpu_worker.main", "--master", self.master.address, "--device", f"cuda:{gpu}"),
                *("--worker-id", worker_id, "--handlers", "mps_handlers", "--mps", "on"),
                *("--mps-pipe-dir", str(self.pipes), "--log-format", "json", *flags),
                stdout=file,
                stderr=file,
                env={**self.env, **env},
            )
        worker = MpsWorker(worker_id, gpu, process, log)
        self.workers.append(worker)
        return worker

    async def worker(self, gpu: int, *flags: str, **env: str) -> MpsWorker:
        """Start a worker, and wait for its session."""
        worker = await self.launch(gpu, *flags, **env)
        stream = asyncio.create_task(self.stream(worker))
        exited = asyncio.create_task(worker.process.wait())
        await asyncio.wait({stream, exited}, return_when=asyncio.FIRST_COMPLETED)
        assert not exited.done(), worker.log
        exited.cancel()
        worker.stream = await stream
        return worker

    async def stream(self, worker: MpsWorker, timeout_s: float = 60.0) -> Stream:
        """A worker's session, whichever worker's comes first."""
        async with asyncio.timeout(timeout_s):
            while worker.worker_id not in self._streams:
                with contextlib.suppress(TimeoutError):
                    stream = await self.master.stream(0.1)
                    self._streams[stream.hello.worker_id] = stream
        return self._streams.pop(worker.worker_id)

    def start_daemon(self, gpu: int) -> None:
        """Start a GPU's control daemon, as its systemd unit does."""
        subprocess.run([PROGRAM, "-d"], env=self._control_env(gpu), timeout=20, check=True)

    def _control_env(self, gpu: int) -> dict[str, str]:
        pipe_dir = self.pipe_dir(gpu)
        return {
            **self.env,
            "CUDA_VISIBLE_DEVICES": self.device_id(gpu),
            "CUDA_MPS_PIPE_DIRECTORY": str(pipe_dir),
            "CUDA_MPS_LOG_DIRECTORY": str(pipe_dir / "log"),
        }

    def control(self, gpu: int, command: str) -> str:
        """A command to a GPU's daemon, and its answer."""
        done = subprocess.run(
            [PROGRAM],
            input=command + "\n",
            env=self._control_env(gpu),
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return done.stdout.strip()

    def counts(self, gpu: int) -> dict[str, Any]:
        """What the simulated daemon counted; see its README."""
        counts = json.loads(self.control(gpu, "fake counts"))
        assert isinstance(counts, dict)
        return counts
