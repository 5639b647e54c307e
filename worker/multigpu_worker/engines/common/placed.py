"""Loads a model that does not fit on one device: a planned device map, which accelerate executes."""

import atexit
import dataclasses
import importlib.util
import shutil
import tempfile
from typing import Any

import structlog
import torch
from multigpu.config.values import from_text

from multigpu_worker.device.cpu import host_memory_bytes
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.planning.plan import make_plan
from multigpu_worker.engines.planning.wish import CPU, DISK, USABLE_SHARE, PlanError, Wish, gib
from multigpu_worker.repository.files import read_json
from multigpu_worker.repository.model import STRATEGIES, ModelFolderError, ModelSpec

# Of a GPU's free memory. The worker's models may take 0.9 of a GPU, and the cache of an engine takes up to half of what
# the plan leaves.
GPU_SHARE = 0.8

log = structlog.get_logger(__name__)


def placement(spec: ModelSpec, settings: EngineSettings, precision: str) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a model with a device_map, served at `precision`; none without one.

    Raises ModelFolderError: it does not fit so.
    """
    if not spec.device_map:
        return {}
    if importlib.util.find_spec("accelerate") is None:
        raise ModelFolderError("device_map needs the package accelerate: pip install accelerate")
    limits = {place: int(from_text(size, int, "size_bytes")) for place, size in spec.max_memory.items()}
    if settings.device == CPU:
        free = {CPU: (limits.pop(CPU, None), host_memory_bytes())}
    else:
        free = {
            f"cuda:{index}": (limits.pop(str(index), None), torch.cuda.mem_get_info(index)[0])
            for index in range(spec.devices or torch.cuda.device_count())
        }
    names, share = list(free), USABLE_SHARE if settings.device == CPU else GPU_SHARE
    wish = Wish(
        devices=[
            (name, int(free_bytes * share) if limit is None else limit) for name, (limit, free_bytes) in free.items()
        ],
        strategy=spec.device_map if spec.device_map in STRATEGIES else "auto",
        host_bytes=limits.pop(CPU, 0),
        disk_bytes=limits.pop(DISK, 0),
        device_map=None if spec.device_map in STRATEGIES else read_json(spec.folder / spec.device_map),
    )
    if limits:
        keys = [DISK] if names == [CPU] else [*map(str, range(len(names))), DISK]
        raise ModelFolderError(f"max_memory has {min(limits)!r}: the keys here are cpu, {', '.join(keys)}")
    try:
        plan = make_plan(dataclasses.replace(spec, precision=precision), wish)
    except PlanError as error:
        raise ModelFolderError(f"device_map: {error}") from error
    log.info("the model is divided", host=gib(plan["host_bytes"]), disk=gib(plan["disk_bytes"]), notes=plan["notes"])
    places = {module: names[place] if isinstance(place, int) else place for module, place in plan["device_map"].items()}
    # accelerate reads what is on the disk from the model's own files; what it has to convert, it writes there.
    folder = tempfile.mkdtemp(prefix="mgpu-offload-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"device_map": places, "offload_folder": folder}
