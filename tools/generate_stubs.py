"""Generates the Python stubs under client/multigpu/v1 from protos/. Run it after every change to a .proto file:

    python tools/generate_stubs.py

tests/test_protos.py generates them again and compares.
"""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Writes <out>/multigpu/v1/*_pb2.py, *_pb2.pyi and, for services, *_pb2_grpc.py."""
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    include = [f"-I{ROOT / 'protos'}", f"-I{well_known}"]
    services = [p for p in protos if p.stem.endswith("_service")]
    for flags, files in (
        ([f"--python_out={out}", f"--pyi_out={out}"], protos),
        ([f"--grpc_python_out={out}"], services),
    ):
        code = protoc.main(["protoc", *include, *flags, *map(str, files)])
        if code != 0:
            sys.exit(code)


if __name__ == "__main__":
    generate(ROOT / "client")
