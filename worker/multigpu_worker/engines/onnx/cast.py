"""Converts a float32 ONNX graph to 16 bits with nvidia-modelopt's AutoCast, in a subprocess.

A trial run of the graph finds operations whose values do not fit into 16 bits; those stay float32. Inputs and outputs
keep their types.
"""

from pathlib import Path

from multigpu_worker.engines.common.subprocess_call import subprocess_call

TYPES = ("fp16", "bf16")


def cast_graph(graph: Path, cast: Path, precision: str, threads: int = 0) -> None:
    """Write the converted `graph` to the file `cast`. ModelFolderError: it failed, or nvidia-modelopt is missing."""
    assert precision in TYPES, precision
    arguments = {"graph": str(graph), "cast": str(cast), "precision": precision}
    subprocess_call(f"{__name__}:convert", arguments, threads=threads)


def convert(*, graph: str, cast: str, precision: str) -> None:
    """Run in the subprocess."""
    import onnx  # noqa: PLC0415  (only in the subprocess)
    from modelopt.onnx import autocast  # noqa: PLC0415  (as above)

    model = autocast.convert_to_mixed_precision(
        graph, low_precision_type=precision, keep_io_types=True, providers=["cpu"]
    )
    onnx.save(model, cast)
