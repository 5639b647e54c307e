"""python -m benchmarks.gateway [--rounds N] [--peer URL]: HTTP beside AsyncClient, in turns, on one fleet.

one      one caller, one sentence at a time: the difference of the medians, ms (aim: at most 1.0)
many     64 callers, one sentence each: HTTP's rate divided by AsyncClient's (aim: 0.85)
stream   a streamed answer of 256 tokens by a model of random weights: tokens/s over HTTP divided by `generate`'s (0.95)
idle     1,000 streams that wait for a model: share of a core and memory that each takes (aims: 1 % in all, 20 KiB)
peer     64 callers, one sentence each: the gateway's rate divided by that of the server at --peer, which has the same
         model and OpenAI's protocol (aim: 1.0); one caller: the medians of both, ms

Printed is the median of the rounds' values. A server is idle while the other one is measured.
"""

import argparse
import asyncio
import base64
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from multigpu import AsyncAdminClient, AsyncClient

from benchmarks.engines.embed_engine import sentences
from benchmarks.fleet import Fleet
from benchmarks.relay import loop_runner

CALLERS, ONE, MANY, TOKENS, STREAMS, IDLE_S, SETTLE_S = 64, 100, 512, 256, 1000, 20.0, 0.5
MODEL, PAUSED = "all-MiniLM-L6-v2", "paused"
Embed = Callable[[str], Awaitable[Any]]


class Http:
    """One connection, kept alive."""

    def __init__(self, port: int, host: str = "127.0.0.1", model: str = MODEL) -> None:
        self._port, self._host, self._model = port, host, model

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    def send(self, path: str, body: dict[str, Any], queue: str = "default") -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-Multigpu-Queue: {queue}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)

    async def embed(self, text: str) -> bytes:
        """The answer, JSON."""
        self.send("/v1/embeddings", {"input": text, "model": self._model, "encoding_format": "base64"})
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        return await self._reader.readexactly(int(length[1]))

    async def stream(self, body: dict[str, Any]) -> int:
        """How many events there were."""
        self.send("/v1/chat/completions", body | {"stream": True})
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        events = 0
        while (line := await self._reader.readline()) != b"0\r\n":
            events += line.startswith(b"data: ")
        await self._reader.readline()
        return events

    def close(self) -> None:
        self._writer.close()


async def _each(texts: list[str], callers: list[Embed]) -> list[float]:
    """The seconds of each call, from callers that run together."""
    todo, taken = iter(texts), []

    async def run(call: Embed) -> None:
        for text in todo:
            begun = time.perf_counter()
            await call(text)
            taken.append(time.perf_counter() - begun)

    await asyncio.gather(*(run(call) for call in callers))
    return taken


async def _embeddings(texts: list[str], callers: list[Embed]) -> tuple[float, float]:
    """Of one caller, the median of the seconds; of all, the embeddings a second."""
    one = statistics.median(await _each(texts[:ONE], callers[:1]))
    begun = time.perf_counter()
    await _each(texts[ONE:], callers)
    return one, MANY / (time.perf_counter() - begun)


def _part(texts: list[str], number: int) -> list[str]:
    """The texts of a round."""
    return texts[number * 700 % 3300 :][: ONE + MANY]


def _vector(answer: bytes) -> npt.NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(json.loads(answer)["data"][0]["embedding"]), "<f4")


async def _compare(servers: tuple[Callable[[], Http], Callable[[], Http]], rounds: int) -> None:
    """The gateway and its peer, in turns. Each turn has new connections, because servers close idle ones."""
    texts, ratios, vectors = sentences(4000), [], {}
    ones: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        rate = [0.0, 0.0]
        for side in (0, 1) if number % 2 else (1, 0):
            connections = [servers[side]() for _ in range(CALLERS)]
            for connection in connections:
                await connection.open()
            await asyncio.sleep(SETTLE_S)
            one, rate[side] = await _embeddings(_part(texts, number), [each.embed for each in connections])
            ones[side].append(1000 * one)
            if not number:
                vectors[side] = np.array([_vector(await connections[0].embed(text)) for text in texts[:CALLERS]])
            for connection in connections:
                connection.close()
        ratios.append(rate[0] / rate[1])
        print(f"{number}: {rate[0]:.0f} and {rate[1]:.0f}/s, {ones[0][-1]:.2f} and {ones[1][-1]:.2f} ms", flush=True)
    del ratios[0], ones[0][0], ones[1][0]  # the first warms up
    print(f"peer     {statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})", end="; ")
    print(f"one caller {statistics.median(ones[0]):.2f} and {statistics.median(ones[1]):.2f} ms", end="; ")
    print(f"largest difference of vectors {np.abs(vectors[0] - vectors[1]).max():.1e}")


async def _measure(fleet: Fleet, port: int, gateway: int, rounds: int) -> None:
    texts = sentences(4000)
    connections = [Http(port) for _ in range(CALLERS)]
    for connection in connections:
        await connection.open()
    found: dict[str, list[float]] = {"one": [], "many": [], "stream": []}
    async with AsyncClient(fleet.address) as client:

        async def embed(text: str) -> None:
            await client.embed([text], model=MODEL)

        talk = [{"role": "user", "content": "Hello"}]
        options: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0}

        async def generate() -> float:
            begun = time.perf_counter()
            async with client.generate(talk, model="tiny", stream=True, **options) as pieces:
                [piece async for piece in pieces]
            return TOKENS / (time.perf_counter() - begun)

        async def stream() -> float:
            begun = time.perf_counter()
            await connections[0].stream({"model": "tiny", "messages": talk, **options})
            return TOKENS / (time.perf_counter() - begun)

        by_client: list[Embed] = [embed] * CALLERS
        by_http: list[Embed] = [each.embed for each in connections]
        for number in range(rounds + 1):
            sides = [(by_client, generate), (by_http, stream)]
            order = (0, 1) if number % 2 else (1, 0)
            one, rate, tokens = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
            for side in order:
                callers, streamed = sides[side]
                one[side], rate[side] = await _embeddings(_part(texts, number), callers)
                tokens[side] = await streamed()
            if number:  # the first warms up
                found["one"].append(1000 * (one[1] - one[0]))
                found["many"].append(rate[1] / rate[0])
                found["stream"].append(tokens[1] / tokens[0])
                print(f"{number}: " + ", ".join(f"{name} {found[name][-1]:.3f}" for name in found), flush=True)
    for name, values in found.items():
        print(f"{name:8} {statistics.median(values):.3f}  ({min(values):.3f} to {max(values):.3f})")
    async with AsyncAdminClient(fleet.address) as admin:
        await admin.pause_queue(PAUSED)
    await _idle(port, gateway)


async def _idle(port: int, gateway: int) -> None:
    """Streams whose tasks wait in a paused queue."""
    before = _rss(gateway)
    connections = [Http(port) for _ in range(STREAMS)]
    for connection in connections:
        await connection.open()
        talk = [{"role": "user", "content": "x"}]
        connection.send("/v1/chat/completions", {"model": "tiny", "messages": talk, "stream": True}, PAUSED)
    await asyncio.sleep(12)
    cpu, begun = _cpu(gateway), time.monotonic()
    await asyncio.sleep(IDLE_S)
    share = (_cpu(gateway) - cpu) / (time.monotonic() - begun)
    print(f"idle     {share:.2%} of a core, {(_rss(gateway) - before) / STREAMS / 1024:.1f} KiB each")
    for connection in connections:
        connection.close()


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--peer", type=urlsplit, metavar="URL", help="a server of OpenAI's embeddings, http://HOST:PORT"
    )
    parser.add_argument("--peer-model", default=MODEL, metavar="NAME", help=f"what the peer calls {MODEL}")
    options = parser.parse_args()
    from tests.worker.generate.tiny_llama import save_tiny_llama

    with tempfile.TemporaryDirectory() as folder:
        save_tiny_llama(Path(folder), context=1024, endless=True)
        with Fleet(2, worker_flags=("--models", f"tiny={folder}")) as fleet:
            argv = [sys.executable, "-m", "multigpu_gateway.main", "--master", fleet.address]
            argv += ["--http", "127.0.0.1:0", "--grpc", ""]
            gateway = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
            try:
                assert gateway.stderr is not None
                port = int(json.loads(gateway.stderr.readline())["http"].rpartition(":")[2])
                if peer := options.peer:
                    servers = partial(Http, port), partial(Http, peer.port, peer.hostname, options.peer_model)
                    loop_runner("uvloop")(_compare(servers, options.rounds))
                loop_runner("uvloop")(_measure(fleet, port, gateway.pid, options.rounds))
            finally:
                gateway.terminate()
                gateway.wait()


if __name__ == "__main__":
    main()
