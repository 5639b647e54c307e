"""An embedding model as one ONNX graph: transformer, pooling and what follows, for any number of texts of any length.

What the graph computes is compared with torch, on texts of other shapes than it was exported with, before anybody may
use it: an export that specialised on a shape, or lost a mask, is rejected. The tokenizer is written beside it, so that
who runs the graph needs neither torch nor transformers.

torch is imported by the process that exports (engines/common/subprocess_call.py), and by nobody who only reads.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from multigpu.repository.model import ModelSpec

from multigpu_worker.engines.common.subprocess_call import run_apart
from multigpu_worker.models.folders import ModelFolderError

if TYPE_CHECKING:
    from torch import nn

    from multigpu_worker.engines.embed.text import Inputs

MODEL_FILE = "model.onnx"
OUTPUT = "vectors"
# Of the standard operators; ONNX Runtime 1.24 and TensorRT 10 know it.
OPSET = 20
# Largest difference to torch's vectors, as a share of the largest component: rounding of float32, and of what is
# computed in 16 bits by libraries that don't add in the same order.
DIFFERENCE_MAX = {"fp32": 1e-4, "fp16": 2e-2}
# A graph can't be one file from 2 GiB on; then its weights are another, beside it.
SINGLE_FILE_BYTES_MAX = 1 << 30
# Texts for the trial: of unlike lengths, so that some are padded.
TRIAL_TEXTS = (
    "One sentence of nine words tries the export out.",
    "Short.",
    "A longer text, so that the others are padded: " + "many words follow one another here, " * 8,
    "Numbers such as 1,234.5, and names such as Ada Lovelace, are cut into pieces by a tokenizer.",
    "The last one.",
)


def export_embed(spec: ModelSpec, folder: Path, precision: str = "fp32", threads: int = 0) -> dict[str, str]:
    """Export a model into an empty folder: MODEL_FILE, and what TextInput.read needs. In a process of its own.

    The graph takes input_ids, attention_mask and perhaps token_type_ids, int64 [batch, sequence], and gives OUTPUT,
    float32 [batch, dimension]. With precision "fp16" the transformer's weights and arithmetic are of 16 bits. Raises
    ModelFolderError, also where the graph doesn't compute what torch does; MemoryError.
    """
    if precision not in DIFFERENCE_MAX:
        raise ModelFolderError(f"models are exported at {' and '.join(DIFFERENCE_MAX)}, not at {precision}")
    arguments = {"model": str(spec.folder), "folder": str(folder), "precision": precision}
    facts: dict[str, str] = run_apart(f"{__name__}:export", arguments, threads=threads)
    return facts


def export(*, model: str, folder: str, precision: str) -> dict[str, str]:
    """`export_embed`, in the process that is for it."""
    import numpy as np  # noqa: PLC0415  (as below)
    import torch  # noqa: PLC0415  (takes seconds, and stays out of processes that only read)

    from multigpu_worker.engines.embed.model import load_model  # noqa: PLC0415  (as above)

    source = load_model(Path(model), "cpu", "fp32", pack=False)
    source.text.save(Path(folder))
    tokens = source.text.tokenise(TRIAL_TEXTS)
    trial = source.text.pad(tokens, [0, 1, 3])
    other = source.text.pad(tokens, range(len(TRIAL_TEXTS)))
    wanted = [(inputs, source.embed(inputs)) for inputs in (trial, other, source.text.pad(tokens, [1]))]
    if precision == "fp16":
        source.transformer.to(torch.float16)
    path = Path(folder) / MODEL_FILE
    _write(_whole(source), trial, path)
    difference = max(
        float(np.abs(_compute(path, inputs) - vectors).max() / np.abs(vectors).max()) for inputs, vectors in wanted
    )
    if not difference <= DIFFERENCE_MAX[precision]:  # which a NaN isn't either
        raise ModelFolderError(
            f"the ONNX graph of {model} differs from torch by {difference:.1e} of the largest component, and at "
            f"{precision} {DIFFERENCE_MAX[precision]:.0e} is the most: run this model with engine torch"
        )
    return {"dimension": str(source.dimension), "difference": f"{difference:.1e}"}


def _whole(source: Any) -> "nn.Module":
    """The model as one module of its inputs, by position."""
    import torch  # noqa: PLC0415  (takes seconds, and stays out of processes that only read)

    names = [*source.text.inputs, "attention_mask"]

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer, self.steps = source.transformer, source.steps

        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            inputs = dict(zip(names, tensors, strict=True))
            tokens = self.transformer(**inputs)[0].float()
            vectors: torch.Tensor = self.steps(source.pooling(tokens, inputs["attention_mask"]))
            return vectors

    # Written out as plain operators, attention is what graph optimisers know best.
    source.transformer.set_attn_implementation("eager")
    return Whole().eval()


def _write(module: "nn.Module", trial: "Inputs", path: Path) -> None:
    import torch  # noqa: PLC0415  (takes seconds, and stays out of processes that only read)

    tensors = tuple(torch.from_numpy(array) for array in trial.values())
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    with torch.inference_mode():
        torch.onnx.export(
            module,
            tensors,
            str(path),
            dynamo=True,
            opset_version=OPSET,
            input_names=list(trial),
            output_names=[OUTPUT],
            # The inputs are one argument to `forward`, which takes any number of them.
            dynamic_shapes=(tuple(axes for _ in tensors),),
            external_data=sum(parameter.nbytes for parameter in module.parameters()) > SINGLE_FILE_BYTES_MAX,
            verbose=False,
        )


def _compute(path: Path, inputs: "Inputs") -> Any:
    import onnxruntime  # noqa: PLC0415  (the extra `onnx`)

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run([OUTPUT], dict(inputs))[0]
