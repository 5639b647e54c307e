"""Where plans are built and run: the library, the GPU and its memory."""

from pathlib import Path

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.tensorrt.build import PLAN_FILE, PlanOrder, artifacts_of, get_plan
from multigpu_worker.engines.tensorrt.device_memory import open_memory
from multigpu_worker.engines.tensorrt.module import require
from multigpu_worker.engines.tensorrt.profiles import Limits, profiles_for
from multigpu_worker.engines.tensorrt.run import PlanRunner

# Long enough to load a plan from the cache, so that the facts of loading can name it.
SETTLE_S = 2.0


class PlanSite:
    """A worker's GPU with TensorRT."""

    def __init__(self, settings: EngineSettings) -> None:
        """Raises EngineUnavailableError."""
        self.library, self.gpu = require(settings.device)
        self.memory = open_memory()
        self._settings = settings

    def order(self, graph: Path, precision: str, limits: Limits, accuracy: str = "") -> PlanOrder:
        return PlanOrder(
            graph=graph,
            precision=precision,
            profiles=profiles_for(limits),
            library=self.library,
            gpu=self.gpu,
            accuracy=accuracy,
        )

    def load(self, order: PlanOrder) -> tuple[PlanRunner, dict[str, str]]:
        """Load a plan from the cache, or build it first. Raises ModelFolderError, MemoryError, OSError."""
        plan = get_plan(order, artifacts_of(self._settings))
        return PlanRunner(plan.folder / PLAN_FILE, self.library.module, self.memory), dict(plan.facts)
