"""multigpu._sync is what tools/generate_sync.py makes of multigpu._async."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_synchronous_clients_are_those_that_the_asynchronous_ones_give(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("generate_sync", ROOT / "tools" / "generate_sync.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.generate(tmp_path)
    kept = ROOT / "client" / "multigpu" / "_sync"
    made = {path.name: path.read_text("utf-8") for path in (tmp_path / "_sync").glob("*.py")}
    assert made == {path.name: path.read_text("utf-8") for path in kept.glob("*.py")}
    assert "client.py" in made
