"""Loads a model that does not fit on its device: a planned device map, which accelerate executes."""

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

log = structlog.get_logger(__name__)


def placement(spec: ModelSpec, settings: EngineSettings, precision: str) -> dict[str, Any]:
    """The arguments of `from_pretrained` for a model with a device_map, which is served at `precision`. Raises
    ModelFolderError: it does not fit so.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise ModelFolderError("device_map needs the package accelerate: pip install accelerate")
    limits = {place: int(from_text(size, int, "size_bytes")) for place, size in spec.max_memory.items()}
    on_cpu = settings.device == CPU
    if on_cpu:
        free_bytes, limit = host_memory_bytes(), limits.pop(CPU, None)
    else:
        free_bytes, limit = torch.cuda.mem_get_info(settings.device)[0], limits.pop("0", None)
    wish = Wish(
        devices=[(settings.device, int(free_bytes * USABLE_SHARE) if limit is None else limit)],
        strategy=spec.device_map if spec.device_map in STRATEGIES else "auto",
        host_bytes=limits.pop(CPU, 0),
        disk_bytes=limits.pop(DISK, 0),
        device_map=None if spec.device_map in STRATEGIES else read_json(spec.folder / spec.device_map),
    )
    if limits:
        raise ModelFolderError(f"max_memory has {min(limits)!r}, and this worker has one device, 0")
    try:
        plan = make_plan(dataclasses.replace(spec, precision=precision), wish)
    except PlanError as error:
        raise ModelFolderError(f"device_map: {error}") from error
    log.info("the model is divided", host=gib(plan["host_bytes"]), disk=gib(plan["disk_bytes"]), notes=plan["notes"])
    places = {module: settings.device if place == 0 else place for module, place in plan["device_map"].items()}
    # accelerate reads what is on the disk from the model's own files; what it has to convert, it writes there.
    folder = tempfile.mkdtemp(prefix="mgpu-offload-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"device_map": places, "offload_folder": folder}
