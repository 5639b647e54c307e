"""Generates the Python stubs: under client/multigpu/v1 from protos/, and the gateway's beside their .proto files. Run
it after every change to a .proto file:

    python tools/generate_stubs.py

tests/test_protos.py generates them again and compares.
"""

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
# The folder of the gateway's packages, and their .proto files.
GATEWAY = ROOT / "gateway"
PROTOS = ("multigpu_gateway/kserve/open_inference.proto", "multigpu_gateway/tei/tei.proto")


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
        _run(*include, *flags, *map(str, files))


def generate_gateway(out: Path) -> None:
    """Writes *_pb2.py and *_pb2.pyi of PROTOS below <out>/multigpu_gateway."""
    _run(f"-I{GATEWAY}", f"--python_out={out}", f"--pyi_out={out}", *(str(GATEWAY / each) for each in PROTOS))


def _run(*arguments: str) -> None:
    code = protoc.main(["protoc", *arguments])
    if code != 0:
        sys.exit(code)


if __name__ == "__main__":
    generate(ROOT / "client")
    generate_gateway(GATEWAY)
