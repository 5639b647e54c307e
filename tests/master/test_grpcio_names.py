"""A master whose grpcio lacks private names that it uses does not start, and says so."""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc
from multigpu_master.rpc import grpcio_check, transport

MISSING = """
import importlib, runpy, sys
module, _, name = sys.argv.pop(1).partition(":")
owner, attribute = importlib.import_module(module), name.partition(".")[0]
if "." in name:  # types of Cython can't be changed
    kept = {key: None for key in dir(owner.AioServer) if key != name.partition(".")[2]}
    owner.AioServer = type("AioServer", (), kept)
else:
    delattr(owner, attribute)
runpy.run_module("multigpu_master.main", run_name="__main__")
"""


@pytest.mark.parametrize("name", [*grpcio_check.NAMES, "grpc._cython.cygrpc:AioServer"])
def test_a_master_without_a_private_name_of_grpcio_says_so_and_does_not_start(name: str, tmp_path: Path) -> None:
    flags = ["--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(
        [sys.executable, "-c", MISSING, name, *flags], capture_output=True, text=True, timeout=60, check=False
    )
    core = ", ".join(entry.partition(":")[2] for entry in grpcio_check.NAMES if entry.startswith(name))
    wanted = (
        f"mgpu-master: grpcio {grpc.__version__} lacks {core}: the master does not start, because one malformed call "
        "could end gRPC's own server; run `pip install 'multigpu[master]'`\n"
    )
    assert (done.stderr, done.stdout, done.returncode) == (wanted, "", 1)
    assert not (tmp_path / "data").exists()


def test_every_private_name_in_use_is_checked() -> None:
    source = Path(transport.__file__).read_text("utf-8")
    used = {f"grpc._cython.cygrpc:{name}" for name in re.findall(r"cygrpc\.(\w+)", re.sub(r'".*?"', "", source))}
    used |= {f"grpc.aio._server:{name}" for name in re.findall(r"aio_server\.(\w+)", source)}
    # Methods of the base class that _Core calls or overrides.
    body = source.partition("class _Core(")[2].partition("\ndef ")[0]
    methods = set(re.findall(r"(?:self|super\(\))\.(\w+)\(|def (\w+)", body))
    inherited = {name for pair in methods for name in pair if name and hasattr(cygrpc.AioServer, name)}
    used |= {f"grpc._cython.cygrpc:AioServer.{name}" for name in inherited if not name.startswith("__")}
    assert used - {"grpc._cython.cygrpc:AioServer"} == set(grpcio_check.NAMES)
    assert all(pkgutil.resolve_name(name) for name in used)
