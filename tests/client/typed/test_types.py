"""pyright sees the types of the SDK as mypy does. It is run as basedpyright, which needs no Node.js of the host."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_pyright_sees_the_types_of_a_users_program(tmp_path: Path) -> None:
    config = tmp_path / "pyrightconfig.json"
    settings = {
        "include": [str(ROOT / "tests" / "client" / "typed" / "user_program.py")],
        "extraPaths": [str(ROOT / "client")],
        "typeCheckingMode": "standard",
        "enableTypeIgnoreComments": False,  # those of mypy
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    config.write_text(json.dumps(settings), "utf-8")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    command += ["--project", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    assert found["generalDiagnostics"] == []
