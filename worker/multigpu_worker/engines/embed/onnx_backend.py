"""The embed engine's back end on ONNX Runtime, in a process that never imports torch.

The first load exports the model (engines/onnx/export.py); later loads find the graph in the artifact cache. Precisions:
fp32, fp16 (no faster than fp32) and int8 on a CPU; fp32, tf32 and fp16 on a GPU.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.embed.backend import identity_of
from multigpu_worker.engines.embed.text import Inputs, TextInput
from multigpu_worker.engines.onnx.artifacts import exported
from multigpu_worker.engines.onnx.export import MODEL_FILE, OUTPUT, TOKENS
from multigpu_worker.engines.onnx.session import Session, check_precision, threads_of
from multigpu_worker.repository.model import ModelSpec

# Tokens in one forward pass, padding included. Measured with MiniLM on an Intel core, 256 sentences in a batch: 512 are
# 2 % slower than 256, 2,048 are 30 % slower. A GPU is busy only with many.
CPU_TOKENS_PER_THREAD = 256
CUDA_TOKENS = 16_384


@dataclass(slots=True, kw_only=True)
class OnnxEmbedModel:
    """A TokenBackend on ONNX Runtime."""

    text: TextInput
    dimension: int
    identity: str
    tokens_max: int
    pads: bool = True
    session: Session = field(repr=False)

    def embed(self, inputs: Inputs) -> npt.NDArray[np.float32]:
        """Vectors [rows, dimension] of padded inputs. Raises MemoryError if the host or the device has too little."""
        vectors: npt.NDArray[np.float32] = self.session.run(inputs, [OUTPUT])[OUTPUT]
        return vectors

    def embed_tokens(self, inputs: Inputs) -> npt.NDArray[np.float32]:
        """Token vectors [rows, width, components] of padded inputs. Raises MemoryError, as above."""
        vectors: npt.NDArray[np.float32] = self.session.run(inputs, [TOKENS])[TOKENS]
        return vectors


def load(spec: ModelSpec, settings: EngineSettings, precision: str) -> tuple[OnnxEmbedModel, dict[str, str]]:
    """Load a model. See common/backends.py."""
    check_precision(precision, settings.device)
    artifact = exported(spec, settings, "fp32" if precision == "tf32" else precision)
    session = Session(artifact.folder / MODEL_FILE, settings.device, settings.threads, tf32=precision == "tf32")
    facts: dict[str, str] = {name: artifact.facts[name] for name in ("recipe", "accuracy") if name in artifact.facts}
    model = OnnxEmbedModel(
        text=TextInput.read(artifact.folder),
        dimension=int(artifact.facts["dimension"]),
        # The artifact's name is part of it, because another recipe or export gives other vectors.
        identity=identity_of(
            "onnx",
            precision,
            settings.device.partition(":")[0],
            artifact.folder.name,
            packages=("onnxruntime",),
            sources=("embed/onnx_backend.py", "onnx/session.py"),
        ),
        tokens_max=CPU_TOKENS_PER_THREAD * threads_of(settings) if settings.device == "cpu" else CUDA_TOKENS,
        session=session,
    )
    return model, facts
