"""mgpuctl infer and classify on a real fleet with engines of a few lines, beside the models' own files."""

import io
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import multigpu
import numpy as np
import pytest
from multigpu.cli.kinds.infer import read_inputs, write

from tests.client.cli.fleet_up import MGPUCTL, mgpuctl, ok, running

ENGINE = """
import numpy as np
from multigpu._kinds.inference import array_of, tensor_of
from multigpu.v1 import infer_pb2
from multigpu_worker.engines.base import ModelEngine
from multigpu_worker.engines.classify.payload import parse, result, text
from multigpu_worker.engines.common.failures import BadInputError

class Base(ModelEngine):
    one_by_one = False

    def __init__(self, settings):
        (self.model,) = settings.models

    def load(self):
        return {}

    def run(self, batch, prepared, reporter):
        for item in batch.items:
            try:
                reporter.succeed(item, self.answer(item, batch))
            except ValueError as error:
                reporter.fail(item, "BadInput", str(error), retryable=False)

class Doubler(Base):
    def answer(self, item, batch):
        payload = infer_pb2.InferPayload.FromString(item.payload)
        inputs = {tensor.name: array_of(tensor) for tensor in payload.inputs}
        if "x" not in inputs:
            raise ValueError(f"there is no input x among {', '.join(inputs)}")
        outputs = {"twice": inputs["x"] * 2, "rows": np.arange(len(inputs["x"])), **inputs}
        wanted = payload.outputs or [name for name in outputs if name != "x"]
        return infer_pb2.InferResult(outputs=[tensor_of(n, outputs[n]) for n in wanted]).SerializeToString()

class Letters(Base):
    '''The share of each of a, b and c among them.'''

    def answer(self, item, batch):
        payload = parse(item.payload, batch.content_type)
        counts = np.array([text(payload).count(letter) for letter in "abc"], np.float32)
        if not counts.sum():
            raise BadInputError("no a, b or c in it")
        return result(counts / counts.sum(), ["an a", "a b"], payload.top_k, "")
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fleet")
    models = []
    for name, kind, cls in (("doubler", "infer", "Doubler"), ("letters", "classify", "Letters")):
        (folder / name).mkdir()
        (folder / name / f"{name}_engine.py").write_text(ENGINE)
        lines = [f'kind = "{kind}"', f'engine = "{name}_engine:{cls}"', 'source = "python"']
        (folder / name / "model.toml").write_text("\n".join(lines))
        models += ["--model", f"{name}={folder / name}"]
    with running(folder, "--workers", "1", *models) as up:
        yield up.address


def test_outputs_may_have_any_name(tmp_path: Path) -> None:
    """numpy.savez has parameters of its own, and takes no arrays of those names."""
    arrays = {name: np.arange(n) for n, name in enumerate(("file", "allow_pickle", "a/b", "x"))}
    write(arrays, str(tmp_path / "out.npz"))
    with np.load(tmp_path / "out.npz") as found:
        assert {name: len(found[name]) for name in found} == {"file": 0, "allow_pickle": 1, "a/b": 2, "x": 3}


@pytest.mark.slow
def test_arrays_from_json_and_files_give_arrays(address: str, tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "all.npz", x=x, mask=np.array([True, False, True]))
    outputs = json.loads(ok(address, "infer", "doubler", "--input", "x=[[1.5,2],[3,4]]", "--json"))
    assert outputs["twice"] == {"dtype": "float32", "shape": [2, 2], "values": [[3, 4], [6, 8]]}
    assert outputs["rows"] == {"dtype": "int64", "shape": [2], "values": [0, 1]}
    out = tmp_path / "out.npz"
    assert "twice" in ok(address, "infer", "doubler", "--input", f"x=@{tmp_path / 'x.npy'}", "--out", str(out))
    with np.load(out) as found:
        np.testing.assert_array_equal(found["twice"], 2 * x)
    flags = ["--input", f"@{tmp_path / 'all.npz'}", "--output", "mask", "--output", "twice"]
    both = json.loads(ok(address, "infer", "doubler", *flags, "--json"))
    assert list(both) == ["mask", "twice"]
    assert both["mask"] == {"dtype": "bool", "shape": [3], "values": [True, False, True]}
    assert json.loads(ok(address, "infer", "doubler", "--input", "x:int8=[100]", "--json"))["twice"]["values"] == [-56]
    assert json.loads(ok(address, "infer", "doubler", "--input", "x:float64=[0.1]", "--json"))["twice"]["values"] == [
        0.2
    ]
    assert ok(address, "infer", "doubler", "--input", "x=[1]", "--output", "rows").split() == [
        "rows",
        "int64",
        "[1]",
        "0",
    ]


def test_a_pipe_at_both_ends(address: str) -> None:
    x = np.linspace(0, 1, 200_000).reshape(2, -1)
    data = io.BytesIO()
    np.save(data, x)
    argv = [*MGPUCTL, "infer", "doubler", "--input", "x=@-", "--out", "-"]
    # Without a buffer of Python's, writes into a full pipe take only a part.
    env = {**os.environ, "MGPU_MASTER": address, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(argv, input=data.getvalue(), capture_output=True, check=False, timeout=400, env=env)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(io.BytesIO(done.stdout))["twice"], 2 * x)


def test_large_tensors_go_by_reference_and_come_back_bit_for_bit(address: str) -> None:
    x = np.random.default_rng(1).normal(size=(64, 32_768)).astype(np.float32)
    with multigpu.Client(address) as client:
        found = client.infer({"x": x}, model="doubler", outputs=["twice"])
        np.testing.assert_array_equal(found["twice"], 2 * x)
        payload, _ = multigpu._kinds.inference.input_of({"x": x}, ["twice"])
        outcome = client.run_outcome("infer", payload, model="doubler")
        # The master told the place of the result, and not its 8 MiB.
        assert len(outcome.result) > x.nbytes
        assert outcome.message.ByteSize() < 4096
        many = list(client.infer_map(({"x": x + i} for i in range(4)), model="doubler", outputs=["twice"]))
        np.testing.assert_array_equal(many[3]["twice"], 2 * (x + 3))


def test_the_first_numbers_are_reported_in_a_pipe_too(address: str) -> None:
    output = ok(address, "infer", "doubler", "--input", "x=[[1.5,2,3,4,5,6,7,8,9]]", "--output", "twice")
    assert output == "twice  float32 [1, 9]  3, 4, 6, 8, 10, 12, 14, 16, …\n"


def test_whole_numbers_at_the_ends_of_their_type_are_taken() -> None:
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        limits = np.iinfo(dtype)
        (array,) = read_inputs((f"x:{dtype}=[{limits.min},{limits.max}]",)).values()
        assert (array.dtype.name, array.tolist()) == (dtype, [limits.min, limits.max])
    assert read_inputs(("x:int64=[9007199254740993,1.0]",))["x"].tolist() == [2**53 + 1, 1]
    assert read_inputs(("x:int16=[1e3,-2.0]",))["x"].tolist() == [1000, -2]


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["doubler", "--input", "y=[1]"], 5, "no input x among y"),
        (["nope", "--input", "x=[1]"], 1, "no connected worker serves infer with the model 'nope'"),
        (["doubler", "--input", "x"], 2, "KEY=VALUE"),
        (["doubler", "--input", "x=[[1],[2,3]]"], 2, "x is no array"),
        (["doubler", "--input", "x=[1]", "--input", "x=[2]"], 2, "'x' is given twice"),
        (["doubler", "--input", "x:float33=[1]"], 2, "there are bool"),
        (["doubler", "--input", "x=@/nowhere.npy"], 1, "can't read /nowhere.npy"),
        (["doubler", "--input", f"x=@{__file__}"], 1, "is neither a .npy nor a .npz file: write it with numpy.save"),
        (["doubler", "--input", "x=[NaN]", "--json"], 1, "no word for"),
        (["doubler", "--input", "x=[1e39]"], 2, "x doesn't fit into float32"),
        (
            ["doubler", "--input", "x:int8=[[300],[1.7],[-129]]"],
            2,
            "x doesn't fit into int8: 300 is no whole number from -128 to 127",
        ),
        (["doubler", "--input", "x:int8=[128]"], 2, "x doesn't fit into int8: 128 is no whole number from -128 to 127"),
        (["doubler", "--input", "x:int8=[-129]"], 2, "x doesn't fit into int8: -129 is no"),
        (["doubler", "--input", "x:int64=[1.7]"], 2, "x doesn't fit into int64: 1.7 is no"),
        (["doubler", "--input", "x:int64=[9223372036854775808]"], 2, "int64: 9223372036854775808 is no"),
        (["doubler", "--input", "x:uint64=[18446744073709551616]"], 2, "uint64: 18446744073709551616 is no"),
        (["doubler", "--input", "x:uint8=[-1]"], 2, "x doesn't fit into uint8: -1 is no whole number from 0 to 255"),
        (["doubler", "--input", "x:int32=[NaN]"], 2, "x doesn't fit into int32: nan is no"),
        (["doubler", "--input", 'x:int8=["a"]'], 2, "x doesn't fit into int8: it is no array of numbers"),
        (["doubler", "--input", "x=[1]", "--out", "-", "--json"], 2, "both go to stdout"),
        (["doubler", "--input", 'x=["a"]'], 1, "elements of type str"),
    ],
)
def test_what_is_wrong_is_reported(address: str, flags: list[str], status: int, words: str) -> None:
    from click.testing import CliRunner
    from multigpu.cli import cli

    done = CliRunner().invoke(cli, ["infer", "--master", address, *flags])
    assert (done.exit_code, words in done.output) == (status, True), done.output


def test_pickled_arrays_are_rejected(address: str, tmp_path: Path) -> None:
    pickled: Any = np.array([{"a": 1}], dtype=object)
    np.save(tmp_path / "x.npy", pickled, allow_pickle=True)
    done = mgpuctl(address, "infer", "doubler", "--input", f"x=@{tmp_path / 'x.npy'}")
    assert done.returncode == 1
    assert "holds no arrays" in done.stderr


@pytest.mark.slow
def test_lines_are_classified_in_order_and_one_that_fails_is_reported(address: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("aab\nccc\nxyz\nb\n")
    done = mgpuctl(address, "classify", "letters", "--text", str(file), "--top-k", "2", "--json")
    assert done.returncode == 5
    assert "1 of 4 failed" in done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["input"] for one in found] == ["aab", "ccc", "xyz", "b"]
    assert [[c["index"] for c in one.get("classes", [])] for one in found] == [[0, 1], [2, 0], [], [1, 0]]
    assert found[0]["classes"][0]["label"] == "an a"
    assert "no a, b or c" in found[2]["error"]
    lines = ok(address, "classify", "letters", "--text", "-", "--top-k", "1", input="ab\ncb\n").splitlines()
    assert lines == ["ab\t0.500000\t0\tan a", "cb\t0.500000\t1\ta b"]
    rejected = mgpuctl(address, "classify", "letters", str(file))
    assert rejected.returncode == 5
    assert "lines.txt" in rejected.stderr
    assert "has a picture" in rejected.stderr


@pytest.mark.slow
def test_classify_reports_files_that_cannot_be_read_and_goes_on(address: str, tmp_path: Path) -> None:
    first, broken, last = (tmp_path / name for name in ("first", "broken", "last"))
    first.write_text("aab\n")
    broken.write_bytes(b"b\n\xff\n")
    last.write_text("c\n")
    files = [str(first), "/nowhere", str(broken), str(tmp_path), str(last)]
    done = mgpuctl(address, "classify", "letters", "--text", *files, "--json")
    assert (done.returncode, "3 of 6 failed" in done.stderr) == (5, True), done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["input"] for one in found] == ["aab", "nowhere", "b", "broken", tmp_path.name, "c"]
    errors = {one["input"]: one["error"] for one in found if "error" in one}
    assert errors["nowhere"] == "can't read /nowhere: No such file or directory"
    assert "line 2: not UTF-8" in errors["broken"]
    assert "Is a directory" in errors[tmp_path.name]
    pictures = mgpuctl(address, "classify", "letters", "/nowhere.png")
    assert (pictures.returncode, pictures.stdout) == (5, "")
    assert "nowhere.png: can't read /nowhere.png: No such file" in pictures.stderr
