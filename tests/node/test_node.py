"""A client in another language: Node, from npm's gRPC and the .proto files alone, against a real fleet."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.fleet import Fleet

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None, reason="node and npm are not installed"
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a Node client needs, with its packages installed: npm ci begins with removing node_modules."""
    copy = tmp_path_factory.mktemp("checkout")
    node = copy / "tests" / "node"
    node.mkdir(parents=True)
    for name in ("package.json", "package-lock.json", ".npmrc", "client.mjs"):
        shutil.copy(HERE / name, node / name)
    shutil.copytree(ROOT / "protos", copy / "protos")
    (example,) = re.findall("```js\n(.*?)```", (ROOT / "docs" / "clients.md").read_text(), re.DOTALL)
    (node / "example.mjs").write_text(example)
    command = ["npm", "ci", "--no-audit", "--no-fund"]
    done = subprocess.run(command, cwd=node, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), handlers=["trial_handlers"]) as running:
        yield running
        assert not running.faults()


def run_node(checkout: Path, script: str, fleet: Fleet) -> str:
    """What a script prints."""
    command = ["node", f"tests/node/{script}", fleet.address]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def seen(checkout: Path, fleet: Fleet) -> dict[str, Any]:
    """What the Node client saw."""
    report: dict[str, Any] = json.loads(run_node(checkout, "client.mjs", fleet))
    return report


@pytest.mark.slow
def test_the_example_of_the_documentation_runs(checkout: Path, fleet: Fleet) -> None:
    lines = [line.split() for line in run_node(checkout, "example.mjs", fleet).splitlines()]
    assert sorted(words[1:] for words in lines) == [["OUTCOME_STATE_SUCCEEDED", w] for w in ("one", "three", "two")]


def test_it_runs_many_tasks_on_one_stream(seen: dict[str, Any]) -> None:
    assert seen["runMany"] == {"outcomes": 500, "right": 500, "safeIds": True}


def test_it_streams_partial_outputs(seen: dict[str, Any]) -> None:
    assert seen["runPartials"] == {"parts": [[0, "p-0"], [1, "p-1"], [2, "p-2"]], "result": "end of p"}


def test_it_cancels_on_the_stream_and_beside_it(seen: dict[str, Any]) -> None:
    assert seen["runAndCancel"] == {"state": "OUTCOME_STATE_CANCELLED", "error": "Withdrawn"}
    assert seen["submitAndCancel"] == {"cancelled": 1, "state": "OUTCOME_STATE_CANCELLED", "message": "enough"}


def test_it_submits_gets_and_watches_from_a_cursor(seen: dict[str, Any]) -> None:
    assert seen["submitGetWatch"] == {
        "state": "TASK_STATE_SETTLED",
        "result": "a",
        "before": ["a", "b", "c"],
        "after": ["d"],
    }


def test_it_is_told_what_is_wrong(seen: dict[str, Any]) -> None:
    assert seen["runRejected"]["code"] == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert "wait_for_worker" in seen["runRejected"]["message"]
    assert seen["rejected"]["code"] == grpc.StatusCode.NOT_FOUND.value[0]
    assert "never submitted" in seen["rejected"]["details"]


def test_the_lock_file_names_no_registry() -> None:
    packages = json.loads((HERE / "package-lock.json").read_text())["packages"]
    assert all("resolved" not in p for p in packages.values())
    assert all("integrity" in p for name, p in packages.items() if name)
