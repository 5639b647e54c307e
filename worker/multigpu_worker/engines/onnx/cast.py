"""An ONNX graph of float32 as one that computes in 16 bits, by nvidia-modelopt's AutoCast, in a process of its own.

What 16 bits can't hold stays in float32, as a run of the graph shows; inputs and outputs keep their types.
"""

from pathlib import Path

from multigpu_worker.engines.common.subprocess_call import run_apart

TYPES = ("fp16", "bf16")


def cast_graph(graph: Path, cast: Path, precision: str, threads: int = 0) -> None:
    """Write `graph` to `cast`. Raises ModelFolderError, with the remedy where nvidia-modelopt is missing."""
    assert precision in TYPES, precision
    arguments = {"graph": str(graph), "cast": str(cast), "precision": precision}
    run_apart(f"{__name__}:convert", arguments, threads=threads)


def convert(*, graph: str, cast: str, precision: str) -> None:
    """`cast_graph`, in the process that is for it."""
    import onnx  # noqa: PLC0415  (only in that process)
    from modelopt.onnx import autocast  # noqa: PLC0415  (as above)

    model = autocast.convert_to_mixed_precision(
        graph, low_precision_type=precision, keep_io_types=True, providers=["cpu"]
    )
    onnx.save(model, cast)
