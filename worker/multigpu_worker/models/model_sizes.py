"""How much device memory models take: measured for loaded models; for others, measured earlier or estimated.

On a GPU, a measurement is the memory that the driver reports for the model's processes. On a CPU it is the private
memory of these processes, which their end frees: libraries that other processes also map are not included.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from multigpu_worker.daemon_thread import to_daemon_thread
from multigpu_worker.device.sampler import Sampler
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.models.measured_sizes import MeasuredSizes, ModelSize
from multigpu_worker.models.memory_estimates import estimate_bytes
from multigpu_worker.models.residency import Resident
from multigpu_worker.models.routes import ModelRoutes
from multigpu_worker.process_group import with_descendants
from multigpu_worker.processes.model_process import MODEL_SLOTS_MAX
from multigpu_worker.repository.files import digest
from multigpu_worker.repository.model import REMOTE, VLLM, ModelFolderError, ModelSpec
from multigpu_worker.supervision import supervised

# Concurrent tasks of a generation model that does not set `concurrency`.
CONCURRENCY, VLLM_CONCURRENCY = 8, 64
# A later measurement replaces an earlier one only if it is larger by more than this share.
GROWTH = 0.05
_SAMPLE_TIMEOUT_S = 5.0


def slots_of(spec: ModelSpec) -> int:
    """How many tasks one instance of a model runs at the same time."""
    several = spec.kind == "generate" or spec.engine == REMOTE
    default = VLLM_CONCURRENCY if spec.engine == VLLM else CONCURRENCY
    return min(spec.concurrency or default, MODEL_SLOTS_MAX) if several else 1


def slots_max(routes: ModelRoutes) -> int:
    """The largest number of tasks that a served model runs at the same time."""
    served = (routes.residents[key].spec for key in set(routes.table.values()))
    return max((slots_of(spec) * spec.instances for spec in served), default=1)


class ModelSizes:
    """`limit_bytes`: for all models together; 0: no limit. `changed` is called when a size or digest changes."""

    def __init__(
        self, settings: EngineSettings, sampler: Sampler, limit_bytes: int, changed: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._sampler = sampler
        self._device = sampler.device.info
        self._limit_bytes = limit_bytes
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()
        self._kept = MeasuredSizes(
            Path(settings.artifacts),
            {
                "device": self._device.product,
                "engine": settings.engine,
                "precision": settings.precision,
                "threads": str(settings.threads),
            },
        )
        # Never modified, only replaced: `prepare` may run on another thread.
        self._known: Mapping[str, tuple[ModelSpec, ModelSize]] = {}

    def prepare(self, specs: Mapping[str, ModelSpec]) -> None:
        """Look up the sizes of these models, so that `of` reads no files for them. Any thread may call it."""
        known = self._known
        self._known = {
            model: known[model] if model in known and known[model][0] == spec else (spec, self._look_up(spec))
            for model, spec in specs.items()
        }

    def of(self, spec: ModelSpec) -> ModelSize:
        """The size of a model that is not loaded."""
        known = self._known.get(spec.id)
        return known[1] if known is not None and known[0] == spec else self._look_up(spec)

    def _look_up(self, spec: ModelSpec) -> ModelSize:
        measured = self._kept.find(spec)
        if measured is not None:
            return measured
        slots = slots_of(spec)
        return ModelSize(
            memory_bytes=estimate_bytes(spec, self._settings, self._device, slots=slots, limit_bytes=self._limit_bytes)
        )

    def measure(self, resident: Resident, pids: Sequence[int], device_bytes: int = 0, *, again: bool = False) -> None:
        """Measure a loaded model in the background, and hash its files. `device_bytes`: memory that one engine itself
        counts, for drivers that report none per process. `again`: a repeated measurement, which counts only if larger.
        """
        resident.measured_at = time.monotonic()
        task = supervised(asyncio.create_task(self._measure(resident, pids, device_bytes, again=again)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _measure(self, resident: Resident, pids: Sequence[int], device_bytes: int, *, again: bool) -> None:
        if resident.spec.engine == VLLM or resident.spec.ranks > 1:
            pids = await asyncio.to_thread(with_descendants, pids)
        found_bytes = await self._memory_of(pids) or device_bytes * resident.spec.instances
        if found_bytes > (resident.memory_bytes * (1 + GROWTH) if again else 0):
            resident.memory_bytes, resident.measured = found_bytes, True
            self._changed()
            size = ModelSize(
                memory_bytes=found_bytes, load_s=resident.load_s, measured=True, signature=resident.signature
            )
            await asyncio.to_thread(self._kept.keep, resident.spec, size)
        if not resident.digest:
            with contextlib.suppress(OSError, ModelFolderError):  # the files may be gone
                resident.digest = await to_daemon_thread(digest, resident.spec)
                self._changed()

    async def _memory_of(self, pids: Sequence[int]) -> int:
        """Memory of these processes in bytes, in a group on the device where they use most; 0: unknown."""
        if self._device.device_id == "cpu":
            return await asyncio.to_thread(lambda: sum(map(private_bytes, pids)))
        sample = await self._sampler.sample(_SAMPLE_TIMEOUT_S)
        if sample is None:
            return 0
        return max(
            sum(process.memory_used_bytes or 0 for process in telemetry.processes if process.pid in pids)
            for telemetry in sample.telemetry.each
        )


def private_bytes(pid: int) -> int:
    """Private memory of a process in bytes; 0: it has ended, or belongs to another user."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return sum(int(fields[name].split()[0]) << 10 for name in ("Private_Clean", "Private_Dirty") if name in fields)
