"""Exports an embedding model as one ONNX graph: transformer, pooling and later steps, for batches of any shape.

The graph's vectors are compared with torch's, also for shapes other than that of the export: an export that fits only
one shape, or lost the mask, is rejected. The tokenizer is saved with the graph, so running it needs neither torch nor
transformers. The export runs in a subprocess, which alone imports torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from multigpu_worker.engines.common.subprocess_call import subprocess_call
from multigpu_worker.repository.folders import ModelFolderError
from multigpu_worker.repository.model import ModelSpec

if TYPE_CHECKING:
    from torch import nn

    from multigpu_worker.engines.embed.text import Inputs

MODEL_FILE = "model.onnx"
OUTPUT = "vectors"
# The transformer's vectors of tokens. ONNX Runtime computes them on the way; a plan of TensorRT would copy them.
TOKENS = "tokens"
# Supported by ONNX Runtime 1.24 and TensorRT 10.
OPSET = 20
# Largest difference to torch's vectors, relative to the largest component: the graph adds, and so rounds, in another
# order.
DIFFERENCE_MAX = {"fp32": 1e-4, "fp16": 2e-2}
# Larger graphs keep their weights in a second file: one file holds less than 2 GiB.
SINGLE_FILE_BYTES_MAX = 1 << 30
# Texts for the comparison, of different lengths, so that some are padded.
TRIAL_TEXTS = (
    "One sentence of nine words tries the export out.",
    "Short.",
    "A longer text, so that the others are padded: " + "many words follow one another here, " * 8,
    "Numbers such as 1,234.5, and names such as Ada Lovelace, are cut into pieces by a tokenizer.",
    "The last one.",
)


def export_embed(
    spec: ModelSpec, folder: Path, precision: str = "fp32", threads: int = 0, *, tokens: bool = False
) -> dict[str, str]:
    """Export a model into an empty folder: MODEL_FILE and the files for TextInput.read.

    The graph takes input_ids, attention_mask and perhaps token_type_ids, int64 [batch, sequence], and returns OUTPUT,
    float32 [batch, dimension], and with `tokens` also TOKENS, float32 [batch, sequence, components]. At fp16 the
    transformer computes in 16 bits. Raises MemoryError; ModelFolderError, also if the graph's vectors differ from
    torch's.
    """
    if precision not in DIFFERENCE_MAX:
        raise ModelFolderError(f"models are exported at {' and '.join(DIFFERENCE_MAX)}, not at {precision}")
    arguments = {"model": str(spec.folder), "folder": str(folder), "precision": precision, "tokens": tokens}
    facts: dict[str, str] = subprocess_call(f"{__name__}:export", arguments, threads=threads)
    return facts


def export(*, model: str, folder: str, precision: str, tokens: bool) -> dict[str, str]:
    """Run in the subprocess."""
    import numpy as np  # noqa: PLC0415  (only in the subprocess)
    import torch  # noqa: PLC0415  (as above)

    from multigpu_worker.engines.embed.model import load_model  # noqa: PLC0415  (as above)

    source = load_model(Path(model), "cpu", "fp32", pack=False)
    source.text.save(Path(folder))
    tokenised = source.text.tokenise(TRIAL_TEXTS)
    trial, other, single = (source.text.pad(tokenised, rows) for rows in ([0, 1, 3], range(len(TRIAL_TEXTS)), [1]))
    outputs = {OUTPUT: source.embed} | ({TOKENS: source.embed_tokens} if tokens else {})
    wanted = [(inputs, [compute(inputs) for compute in outputs.values()]) for inputs in (trial, other, single)]
    if precision == "fp16":
        source.transformer.to(torch.float16)
    path = Path(folder) / MODEL_FILE
    _write(_whole(source, tokens), trial, list(outputs), path)
    differences = [
        np.abs(found - expected).max() / np.abs(expected).max()
        for inputs, arrays in wanted
        for found, expected in zip(_compute(path, list(outputs), inputs), arrays, strict=True)
    ]
    difference = float(np.max(differences))  # Python's max may ignore NaN
    if not difference <= DIFFERENCE_MAX[precision]:  # also true for NaN
        raise ModelFolderError(
            f"the ONNX graph of {model} differs from torch by {difference:.1e} of the largest component, and at "
            f"{precision} {DIFFERENCE_MAX[precision]:.0e} is the most: run this model with engine torch"
        )
    return {"dimension": str(source.dimension), "difference": f"{difference:.1e}"}


def _whole(source: Any, with_tokens: bool) -> "nn.Module":
    """The model as one module that takes its inputs by position."""
    import torch  # noqa: PLC0415  (only in the subprocess)

    names = [*source.text.inputs, "attention_mask"]

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer, self.steps = source.transformer, source.steps

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inputs = dict(zip(names, tensors, strict=True))
            tokens = self.transformer(**inputs)[0].float()
            vectors = self.steps(source.pooling(tokens, inputs["attention_mask"]))
            return (vectors, tokens) if with_tokens else (vectors,)

    # Graph optimisers recognise attention only as plain operators, which is what eager attention is. On ONNX Runtime
    # MiniLM with sdpa attention is no faster.
    source.transformer.set_attn_implementation("eager")
    return Whole().eval()


def _write(module: "nn.Module", trial: "Inputs", outputs: list[str], path: Path) -> None:
    import torch  # noqa: PLC0415  (only in the subprocess)

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
            output_names=outputs,
            # `forward` takes all inputs as one variadic argument.
            dynamic_shapes=(tuple(axes for _ in tensors),),
            external_data=sum(parameter.nbytes for parameter in module.parameters()) > SINGLE_FILE_BYTES_MAX,
            verbose=False,
        )


def _compute(path: Path, outputs: list[str], inputs: "Inputs") -> list[Any]:
    import onnxruntime  # noqa: PLC0415  (the extra `onnx`)

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    arrays: list[Any] = session.run(outputs, dict(inputs))
    return arrays
