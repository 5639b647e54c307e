"""Generated modules are what their tools make of their sources."""

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "client" / "multigpu"


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_synchronous_clients_are_those_that_the_asynchronous_ones_give(tmp_path: Path) -> None:
    tool("generate_sync").generate(tmp_path)
    made = {path.name: path.read_text("utf-8") for path in (tmp_path / "_sync").glob("*.py")}
    assert made == {path.name: path.read_text("utf-8") for path in (CLIENT / "_sync").glob("*.py")}
    assert "client.py" in made


def test_the_dataclasses_of_a_fleet_are_those_of_the_protos(tmp_path: Path) -> None:
    tool("generate_fleet").generate(tmp_path / "fleet.py")
    assert (tmp_path / "fleet.py").read_text("utf-8") == (CLIENT / "fleet.py").read_text("utf-8")
