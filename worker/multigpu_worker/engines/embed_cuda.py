"""An embedding model on a GPU: the same numbers as EmbedModel's, and the device never waits for the host.

- `begin` hands a micro-batch to the device and returns; its vectors are fetched when the next one is on its way. Inputs
  and vectors cross the bus by pinned memory, on streams of their own.
- transformers looks into the attention mask whether it masks anything, and waits for the device to say. Here the host
  says: no mask where nothing is padded, else a mask in the form that goes to the attention as it is. One padded pair of
  sentences at load decides whether the model takes that; if not, it gets the mask as ever.
- Small inputs are a hundred short kernels, and the host takes longer to launch them than the device to run them. CUDA
  graphs launch them at once: one for each bucket of rows and width, made when the bucket first comes, if a trial at
  load was faster by graph.
- `torch.compile` is tried where model.toml asks for it (`compile = "try"` under parameters: it takes a minute) and kept
  where it is faster.

The attention is torch's scaled_dot_product_attention, transformers' own choice.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor

from multigpu_worker.engines.embed_backend import Vectors
from multigpu_worker.engines.embed_model import EmbedModel
from multigpu_worker.engines.embed_text import Inputs, TextInput
from multigpu_worker.engines.torch_runtime import bind, memory_errors

# Buckets of widths and rows that have a graph, and padded tokens from which on launching is not what takes the time.
GRAPH_WIDTHS = (16, 32, 64, 128, 256)
GRAPH_ROWS = (1, 2, 4, 8, 16, 32)
GRAPH_TOKENS_MAX = 2048
# What is tried at load, as rows and width: launching decides; arithmetic decides.
SMALL_TRIAL, LARGE_TRIAL = (1, 16), (64, 128)
TRIAL_RUNS = 20
# A way that is faster by less is not worth its memory.
FASTER_BY = 1.05
# Largest difference of a component between two ways through one model, by what its arithmetic rounds to.
TOLERANCE = {"fp32": 1e-5, "tf32": 5e-3, "bf16": 3e-2, "fp16": 5e-3}

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Graph:
    """A captured forward pass: what is put in, and where its vectors are found."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    vectors: Tensor


@dataclass(slots=True, kw_only=True)
class CudaEmbedModel:
    """An EmbedBackend that can be handed the next micro-batch before the last one is done."""

    model: EmbedModel
    uploads: torch.cuda.Stream
    downloads: torch.cuda.Stream
    # The attention takes masks as they are.
    takes_masks: bool = False
    uses_graphs: bool = False
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict)
    # Memory that all graphs share: they run one after the other.
    pool: Any = None

    @property
    def text(self) -> TextInput:
        return self.model.text

    @property
    def dimension(self) -> int:
        return self.model.dimension

    @property
    def identity(self) -> str:
        return self.model.identity

    @property
    def tokens_max(self) -> int:
        return self.model.tokens_max

    @tokens_max.setter
    def tokens_max(self, tokens_max: int) -> None:
        self.model.tokens_max = tokens_max

    def embed(self, inputs: Inputs) -> Vectors:
        """Vectors of padded inputs."""
        return self.begin(inputs)()

    def begin(self, inputs: Inputs) -> Callable[[], Vectors]:
        """Start on padded inputs; the answer waits for their vectors. Both may raise MemoryError."""
        bind(self.model.threads, tf32=self.model.precision == "tf32")
        rows, width = inputs["attention_mask"].shape
        bucket = graph_bucket(rows, width) if self.uses_graphs else None
        with memory_errors(), torch.inference_mode(), torch.cuda.device(self.model.device):
            if bucket is None:
                vectors = self._compute(self._upload(inputs), bool(inputs["attention_mask"].all()))
            else:
                vectors = self._replay(bucket, inputs)[:rows]
            fetched = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.downloads.wait_stream(torch.cuda.current_stream(self.model.device))
            with torch.cuda.stream(self.downloads):
                fetched.copy_(vectors, non_blocking=True)
                done.record(self.downloads)
            vectors.record_stream(self.downloads)

        def wait() -> Vectors:
            done.synchronize()
            array: Vectors = fetched.numpy()
            return array

        return wait

    def _upload(self, inputs: Inputs) -> dict[str, Tensor]:
        """Copy inputs while the device computes. One copy: they have the same shape and type."""
        packed = torch.from_numpy(np.stack(list(inputs.values()))).pin_memory()
        now = torch.cuda.current_stream(self.model.device)
        with torch.cuda.stream(self.uploads):
            there = packed.to(self.model.device, non_blocking=True)
        now.wait_stream(self.uploads)
        # Its memory is not given to others before the computing stream is through with it.
        there.record_stream(now)
        return dict(zip(inputs, there.unbind(), strict=True))

    def _compute(self, inputs: dict[str, Tensor], full: bool) -> Tensor:
        mask = inputs["attention_mask"]
        if not self.takes_masks:
            return self.model.forward(**inputs)
        attended = None if full else attention_of(mask)
        return self.model.forward(**(inputs | {"attention_mask": attended}), pooled_by=mask)

    def _replay(self, bucket: tuple[int, int], inputs: Inputs) -> Tensor:
        if bucket not in self.graphs:
            self.graphs[bucket] = self._capture(bucket)
        graph = self.graphs[bucket]
        for name, padded in fill_bucket(inputs, bucket).items():
            # In the computing stream's order: the graph before this one has read them.
            graph.inputs[name].copy_(torch.from_numpy(padded).pin_memory(), non_blocking=True)
        graph.graph.replay()
        # The next replay may come before these were fetched.
        return graph.vectors.clone()

    def _capture(self, bucket: tuple[int, int]) -> Graph:
        names = [*self.model.text.inputs, "attention_mask"]
        inputs = {name: torch.ones(bucket, dtype=torch.int64, device=self.model.device) for name in names}
        aside = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(aside):
            # Libraries choose their kernels and take their workspaces before anything is recorded.
            for _ in range(3):
                self._compute(inputs, full=False)
        torch.cuda.current_stream(self.model.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        # Another thread may be loading something meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            vectors = self._compute(inputs, full=False)
        return Graph(graph=graph, inputs=inputs, vectors=vectors)


def graph_bucket(rows: int, width: int) -> tuple[int, int] | None:
    """The smallest bucket that holds so many rows of that width; None: none does."""
    wide = next((each for each in GRAPH_WIDTHS if each >= width), None)
    many = next((each for each in GRAPH_ROWS if each >= rows), None)
    if wide is None or many is None or wide * many > GRAPH_TOKENS_MAX:
        return None
    return many, wide


def fill_bucket(inputs: Inputs, bucket: tuple[int, int]) -> Inputs:
    """Inputs with padding up to a bucket's size. Rows that nobody asked for attend to their first token."""
    rows, width = inputs["attention_mask"].shape
    filled = {}
    for name, array in inputs.items():
        filled[name] = np.zeros(bucket, dtype=np.int64)
        filled[name][:rows, :width] = array
    filled["attention_mask"][rows:, 0] = 1
    return filled


def attention_of(mask: Tensor) -> Tensor:
    """A padding mask [rows, width] in the form that scaled_dot_product_attention takes; a view, nothing is copied."""
    rows, width = mask.shape
    return mask.bool()[:, None, None, :].expand(rows, 1, width, width)


def trial_inputs(text: TextInput, rows: int, width: int) -> Inputs:
    """Inputs of that shape, the last row half as long as the others if there is another."""
    inputs = {name: np.ones((rows, width), dtype=np.int64) for name in text.inputs}
    mask = np.ones((rows, width), dtype=np.int64)
    if rows > 1:
        mask[-1, width // 2 :] = 0
    return inputs | {"attention_mask": mask}


def seconds_of(model: CudaEmbedModel, inputs: Inputs) -> float:
    """Of one forward pass with its copies: the median of some."""
    taken = []
    for _ in range(TRIAL_RUNS):
        start = time.perf_counter()
        model.embed(inputs)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def speed_up(model: EmbedModel, *, compiled: bool) -> tuple[CudaEmbedModel, dict[str, str]]:
    """Put a loaded model on its fastest way: each is tried, compared and measured. And facts for people."""
    uploads, downloads = (torch.cuda.Stream(model.device) for _ in range(2))  # type: ignore[no-untyped-call]
    fast = CudaEmbedModel(model=model, uploads=uploads, downloads=downloads)
    facts = {"attention": str(getattr(model.transformer.config, "_attn_implementation", "the model's own"))}
    padded = trial_inputs(model.text, 2, 16)
    expected = fast.embed(padded)

    def attempt(what: str, switch: Callable[[bool], None], inputs: Inputs | None) -> None:
        """Keep a way if it gives the same vectors and, where `inputs` are given, is faster on them."""
        before_s = seconds_of(fast, inputs) if inputs is not None else 0.0
        switch(True)
        try:
            off = float(np.abs(fast.embed(padded) - expected).max())
            after_s = seconds_of(fast, inputs) if inputs is not None else 0.0
            told = f"{before_s * 1e3:.2f} ms without, {after_s * 1e3:.2f} ms with" if inputs is not None else "used"
            kept = off <= TOLERANCE[model.precision] and (inputs is None or after_s * FASTER_BY < before_s)
            facts[what] = told if kept else f"not used: {told}, vectors differ by {off:.1e}"
        except (RuntimeError, TypeError, ValueError, AttributeError, ImportError) as error:
            kept = False
            facts[what] = f"not used: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if not kept:
            switch(False)
            log.info("a faster way is not taken", way=what, reason=facts[what])

    attempt("masks as they are", lambda on: setattr(fast, "takes_masks", on), None)
    if compiled:
        plain = model.transformer
        faster = torch.compile(plain, dynamic=True)
        shape = trial_inputs(model.text, *LARGE_TRIAL)
        attempt("torch.compile", lambda on: setattr(model, "transformer", faster if on else plain), shape)
    attempt("CUDA graphs", lambda on: setattr(fast, "uses_graphs", on), trial_inputs(model.text, *SMALL_TRIAL))
    return fast, facts
