"""`mgpuctl infer`: arrays from files or the command line through a model, to a file, as JSON or as a summary.

Arrays are .npy and .npz files; nothing in them is ever unpickled.
"""

import functools
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from multigpu import Client
from multigpu._kinds.inference import DTYPES, KIND
from multigpu.cli import show
from multigpu.cli.commands import Command
from multigpu.cli.failures import EXIT_CODES, Failure
from multigpu.cli.kinds.vectors import File
from multigpu.cli.options import (
    F,
    json_option,
    key_values,
    master_option,
    priority_option,
    queue_option,
    worker_timeout_option,
)
from multigpu.cli.presence import loading_notes, wait_for_worker
from multigpu.cli.sdk_errors import sdk_session
from multigpu.cli.tasks.lines import DASH, open_input

NPY_MAGIC, NPZ_MAGIC = b"\x93NUMPY", b"PK\x03\x04"
# Numbers of an array in a summary.
SHOWN_MAX = 8


def task_options(command: F) -> F:
    """--queue and --priority, as SDK options in `task`; --wait-for-worker as `wait_s`."""

    @functools.wraps(command)
    def with_task(*args: Any, queue: str, priority: int, **kwargs: Any) -> Any:
        return command(*args, task={"queue": queue, "priority": priority}, **kwargs)

    wait = worker_timeout_option("0", default=0.0)
    return queue_option(priority_option(wait(with_task)))  # type: ignore[return-value]  # wraps changes the type


@click.command(
    cls=Command,
    examples=(
        ("mgpuctl infer doubler --input x=[[1,2],[3,4]]", "JSON: whole numbers are int64, others float32."),
        ("mgpuctl infer vit --input pixels=@batch.npy --out y.npz", "numpy.load('y.npz') has the outputs by name."),
        ("mgpuctl infer m --input mask:bool=[[1,0]]", "Another type, by numpy's name."),
        ("mgpuctl infer m --input @all.npz --output logits", "All inputs of one file; one output."),
        ("make-batch | mgpuctl infer m --input x=@- --json", "A .npy from standard input."),
    ),
    exits=EXIT_CODES,
)
@click.argument("model")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    metavar="NAME=@FILE|NAME=JSON",
    help="A .npy file, or JSON; NAME:float32=[1,2] says a type. @FILE: all arrays of a .npz. May be repeated.",
)
@click.option("--output", "names", multiple=True, metavar="NAME", help="Which to return; repeatable.  [default: all]")
@click.option("--out", "output_path", metavar="FILE", help='A .npz for the outputs; "-" is standard output.')
@task_options
@master_option
@json_option
def infer(
    model: str,
    inputs: tuple[str, ...],
    names: tuple[str, ...],
    output_path: str | None,
    task: dict[str, Any],
    address: str,
    wait_s: float,
    as_json: bool,
) -> None:
    """Run arrays through MODEL.

    The first dimension of an input counts the examples. Without --out the outputs are shown; --json prints them whole.
    """
    if output_path == DASH and as_json:
        raise click.UsageError("the arrays and --json can't both go to stdout: write the arrays to a file with --out")
    arrays = read_inputs(inputs)
    with sdk_session():
        wait_for_worker(address, KIND, model, timeout_s=wait_s, say=show.note)
        with Client(address) as client, loading_notes(address, KIND, model, show.note):
            found = client.infer(arrays, model=model, outputs=names, **task)
    if output_path is not None:
        write(found, output_path)
    if as_json:
        show.value({name: to_json(name, array) for name, array in found.items()})
    elif output_path != DASH:
        show.facts([(name, describe(array)) for name, array in found.items()])


def read_inputs(entries: tuple[str, ...]) -> dict[str, NDArray[Any]]:
    """The arrays that --input flags name. Raises Failure, BadParameter."""
    arrays: dict[str, NDArray[Any]] = {}
    for entry in entries:
        if entry.startswith("@"):
            found = load(entry[1:])
            if not isinstance(found, dict):
                raise click.BadParameter(f"{entry[1:]} is one array: write NAME={entry}", param_hint="--input")
        else:
            (name, value), *_ = key_values("--input", [entry]).items()
            name, _, dtype = name.partition(":")
            array = array_from_file(value[1:]) if value.startswith("@") else array_from_json(name, value, dtype)
            from_json = not value.startswith("@") and array.dtype == np.float64
            # Models take float32 far more often than float64.
            found = {name: cast(name, array, dtype or ("float32" if from_json else array.dtype.name))}
        if twice := sorted(set(found) & set(arrays)):
            raise click.BadParameter(f"the input {twice[0]!r} is given twice", param_hint="--input")
        arrays |= found
    return arrays


def load(path: str) -> NDArray[Any] | dict[str, NDArray[Any]]:
    """The array of a .npy file, or the arrays of a .npz file. Raises Failure."""
    with open_input(path) as file:
        data = file.read()
    if not data.startswith((NPY_MAGIC, NPZ_MAGIC)):  # numpy's error would advise to allow pickles
        raise Failure(f"{path} is neither a .npy nor a .npz file: write it with numpy.save or numpy.savez")
    try:
        found = np.load(io.BytesIO(data), allow_pickle=False)
        return found if isinstance(found, np.ndarray) else dict(found)
    except (OSError, ValueError, EOFError) as error:
        raise Failure(f"{path} holds no arrays ({error}): write it with numpy.save or numpy.savez") from error


def array_from_file(path: str) -> NDArray[Any]:
    found = load(path)
    if isinstance(found, dict):
        raise Failure(f"{path} holds several arrays, {', '.join(found)}: write --input @{path} for all of them")
    return found


def array_from_json(name: str, text: str, dtype: str = "") -> NDArray[Any]:
    """An array. Python numbers are kept when floats are cast to an integer `dtype`: float64 would round large ones."""
    try:
        value = json.loads(text)
        array = np.asarray(value)
        return np.asarray(value, object) if array.dtype.kind == "f" and is_whole(dtype) else array
    except ValueError as error:
        raise click.BadParameter(f"{name} is no array: {error}", param_hint="--input") from error


def cast(name: str, array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The array as `dtype`. Raises BadParameter for an unknown type, or a number that doesn't fit into it."""
    if dtype == array.dtype.name:
        return array
    if dtype not in DTYPES or dtype == "bfloat16":
        known = ", ".join(known for known in DTYPES if known != "bfloat16")
        raise click.BadParameter(f"{name} can't be {dtype!r}: there are {known}", param_hint="--input")
    try:
        if is_whole(dtype):
            check_whole(array, np.iinfo(dtype))
        with np.errstate(over="raise", invalid="raise"):
            return array.astype(dtype)
    except (FloatingPointError, OverflowError, TypeError, ValueError) as error:
        raise click.BadParameter(f"{name} doesn't fit into {dtype}: {error}", param_hint="--input") from error


def is_whole(dtype: str) -> bool:
    return dtype in DTYPES and dtype.startswith(("int", "uint"))


def check_whole(array: NDArray[Any], limits: "np.iinfo[Any]") -> None:
    """Raises ValueError for the first number that is not an integer within the limits: `astype` would change it."""
    if array.dtype.kind == "O" and all(isinstance(value, (int, float)) for value in array.flat):
        right = [limits.min <= value <= limits.max and value == int(value) for value in array.flat]
        fits = np.array(right, bool).reshape(array.shape)
    elif array.dtype.kind in "biuf":
        # The bounds are 0 or powers of two, which are exact as floats.
        fits = (array >= int(limits.min)) & (array < int(limits.max) + 1)
        if array.dtype.kind == "f":
            fits &= np.trunc(array) == array
    else:
        raise ValueError("it is no array of numbers")
    if not fits.all():
        raise ValueError(f"{array[~fits].flat[0]} is no whole number from {limits.min} to {limits.max}")


def write(arrays: dict[str, NDArray[Any]], path: str) -> None:
    """Writes a .npz atomically."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:  # numpy.savez takes no array named "file"
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    if path == DASH:
        show.raw(data.getvalue())
        return
    with File(Path(path)) as file:
        file.write(data.getvalue())


def to_json(name: str, array: NDArray[Any]) -> dict[str, Any]:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise Failure(f"{name} holds NaN or infinity, which JSON has no word for: use --out FILE.npz")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "values": array.tolist()}


def describe(array: NDArray[Any]) -> str:
    """Type, shape and the first numbers."""
    shown = ", ".join(f"{value:g}" if array.dtype.kind == "f" else str(value) for value in array.flat[:SHOWN_MAX])
    more = ", …" if array.size > SHOWN_MAX else ""
    shape = ", ".join(map(str, array.shape))
    return f"{array.dtype.name} [{shape}]  {shown}{more}"
