"""multigpu with the interface of the peers' `common.Peer`.

`Peer` runs the peers' Python functions as handlers. `Echo` runs the built-in kind "echo", which takes whole batches as
our engines do. Both use `mgpuctl up --workers 2` with every default: durable, fsync on.
"""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import multigpu_master
from multigpu import AsyncClient, Outcome

from benchmarks.relay import loop_runner


class Peer:
    name = "multigpu, handlers"
    durable = "tasks and results, fsync (tasks: before the acknowledgement)"
    skip: tuple[str, ...] = ("W1-chunk256", "W5-1", "W5-32")
    n_bulk = n_window = 20_000
    noop = "peers.noop"

    def start(self) -> None:
        self.dir = tempfile.TemporaryDirectory(prefix=".bench-", dir=".")
        self.up = subprocess.Popen(
            [sys.executable, "-m", "multigpu.cli", "up", "--no-gateway", "--workers", "2", "--device", "cpu",
             "--listen", "127.0.0.1:0", "--data-dir", f"{self.dir.name}/data",
             "--handlers", "benchmarks.peers.handlers"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.up.stdout is not None
        ready = next((line for line in self.up.stdout if line.startswith("ready:")), None)
        if ready is None:
            raise RuntimeError("`mgpuctl up` did not start; run it by hand to see why")
        self.run = loop_runner("uvloop")
        self.run(self._connect(ready.split("master ")[1].split(",")[0]))

    async def _connect(self, address: str) -> None:
        self.client = AsyncClient(address)

    def stop(self) -> None:
        self.run(self.client.close())
        self.up.send_signal(signal.SIGTERM)
        self.up.wait(30)
        assert self.up.stdout is not None
        self.up.stdout.close()
        self.dir.cleanup()

    def version(self) -> str:
        return str(multigpu_master.VERSION)

    def kind(self, op: str) -> str:
        return self.noop if op == "noop" else f"peers.{op}"

    def bulk(self, op: str, payloads: Sequence[bytes]) -> list[bytes]:
        async def go() -> list[bytes]:
            return [r async for r in self.client.map(self.kind(op), payloads)]

        return list(self.run(go()))

    def window(self, op: str, payloads: Sequence[bytes], depth: int) -> list[bytes]:
        kind, out, todo = self.kind(op), [b""] * len(payloads), iter(enumerate(payloads))

        async def caller() -> None:
            for i, payload in todo:
                out[i] = await self.client.run(kind, payload)

        async def go() -> None:
            await asyncio.gather(*(caller() for _ in range(depth)))

        self.run(go())
        return out

    def call(self, op: str, payload: bytes) -> bytes:
        return bytes(self.run(self.client.run(self.kind(op), payload)))

    def stream(self, op: str, payloads: Sequence[bytes], give_up_s: float) -> Iterator[tuple[int, bytes]]:
        numbers = {payload: i for i, payload in enumerate(payloads)}

        async def begin() -> AsyncIterator[Outcome]:
            return self.client.map_outcomes(self.kind(op), payloads, ordered=False)

        outcomes = self.run(begin())

        async def following() -> Outcome | None:
            return await asyncio.wait_for(anext(outcomes, None), give_up_s)

        for _ in itertools.count():
            outcome = self.run(following())
            if outcome is None:
                return
            result = outcome.value()
            yield numbers[result.rpartition(b":")[0]], result

    def kill(self, pid: int) -> None:
        """The whole worker, not only the engine that said its pid."""
        agent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(agent, signal.SIGKILL)


class Echo(Peer):
    name = "multigpu, echo"
    skip = (*Peer.skip, "W4")
    noop = "echo"
