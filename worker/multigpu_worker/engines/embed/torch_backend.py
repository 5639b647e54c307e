"""The embed engine's back end on torch: EmbedModel on a CPU, CudaEmbedModel on a GPU."""

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.placed import placement
from multigpu_worker.engines.common.torch_runtime import bind, dtype_of
from multigpu_worker.engines.embed.backend import EmbedBackend
from multigpu_worker.engines.embed.model import PackedLinear, load_model
from multigpu_worker.repository.model import ModelSpec


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> tuple[EmbedBackend, dict[str, str]]:
    """Load a model. See common/backends.py."""
    dtype_of(precision)
    bind(settings.threads, tf32=precision == "tf32")
    placed = placement(spec, settings, precision)
    model = load_model(
        spec.folder, settings.device, precision, threads=settings.threads, allow_pickle=spec.allow_pickle, placed=placed
    )
    if model.device.type == "cuda" and not placed:
        from multigpu_worker.engines.embed.cuda import speed_up  # noqa: PLC0415  (only GPUs need it)

        return speed_up(model, compiled=spec.parameters.get("compile") == "try")
    facts = {}
    if any(isinstance(m, PackedLinear) for m in model.transformer.modules()):
        facts["linear layers"] = "oneDNN, packed"
    if not model.pads:
        facts["texts"] = "joined, without padding"
    return model, facts
