"""An embedding model on a GPU: the numbers of EmbedModel, without the device waiting for the host.

- `begin` starts a micro-batch and returns; its vectors are fetched after the next one has started. Inputs and vectors
  are copied through pinned memory, on separate streams.
- transformers checks whether the attention mask masks anything, which waits for the device. Here the host decides: no
  mask if nothing is padded, else a mask in the form that attention adds, made once for all layers. A trial at load
  decides whether the model takes that.
- Small inputs are a hundred short kernels, which take longer to launch than to run. CUDA graphs launch them at once:
  one for each bucket of rows and width, captured at its first use, if a trial at load was faster. All graphs share one
  memory pool and one capture stream: on other streams libraries would allocate workspaces for each. If a capture fails,
  the model runs without graphs.
- `torch.compile` is tried if model.toml asks for it (`compile = "try"` under [parameters]; it takes a minute), and used
  if it is faster.

Attention is torch's scaled_dot_product_attention, the default of transformers.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from torch import Tensor

from multigpu_worker.engines.common.torch_runtime import bind, dtype_of, memory_errors
from multigpu_worker.engines.embed.backend import Vectors
from multigpu_worker.engines.embed.model import TRIAL_TEXTS, EmbedModel
from multigpu_worker.engines.embed.text import Inputs, TextInput

# Buckets with a graph. Above GRAPH_TOKENS_MAX padded tokens, computing takes longer than launching.
GRAPH_WIDTHS = (16, 32, 64, 128, 256)
GRAPH_ROWS = (1, 2, 4, 8, 16, 32)
GRAPH_TOKENS_MAX = 2048
# Rows and width of the trials at load: one where launching takes the time, one where computing does.
SMALL_TRIAL, LARGE_TRIAL = (1, 16), (64, 128)
TRIAL_RUNS = 20
# A smaller speed-up is not worth its memory.
FASTER_BY = 1.05
# Largest difference that rounding explains, relative to the largest component. An ignored mask makes 0.6 with MiniLM.
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}
# A capture synchronises the device, which is not allowed during another capture.
_RECORDING = threading.Lock()

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Graph:
    """A captured forward pass, with its inputs as `pack` packs them, and its vectors."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    vectors: Tensor


@dataclass(slots=True, kw_only=True)
class CudaEmbedModel:
    """An AheadBackend on torch. Any thread may call it: another thread compares it with a TensorRT plan."""

    model: EmbedModel
    uploads: torch.cuda.Stream
    downloads: torch.cuda.Stream
    records: torch.cuda.Stream
    # Attention gets the mask that it adds, or none.
    takes_masks: bool = False
    uses_graphs: bool = False
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict)
    # The memory pool that all graphs share: they run one after the other.
    pool: Any = None
    # Held while work is started: a graph has one buffer for its inputs.
    lock: threading.Lock = field(default_factory=threading.Lock)

    text: TextInput = field(init=False)
    dimension: int = field(init=False)
    identity: str = field(init=False)
    pads: bool = field(init=False)
    tokens_max: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("text", "dimension", "identity", "pads", "tokens_max"):
            setattr(self, name, getattr(self.model, name))

    def embed(self, inputs: Inputs) -> Vectors:
        """Vectors [rows, dimension] of padded inputs."""
        return self.begin(inputs)()

    def begin(self, inputs: Inputs) -> Callable[[], Vectors]:
        """Start on padded inputs, and return a function that waits for the vectors. Both may raise MemoryError."""
        rows, width = inputs["attention_mask"].shape
        packed = pack(inputs)
        with self.lock, memory_errors(), torch.inference_mode(), torch.cuda.device(self.model.device):
            bind(self.model.threads, tf32=self.model.precision == "tf32")
            graph = self._graph_for(rows, width)
            if graph is None:
                there = self._upload(packed)
                vectors = self._compute(dict(zip(inputs, there, strict=True)), bool(inputs["attention_mask"].all()))
            else:
                vectors = self._replay(graph, packed)[:rows]
            fetched = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.downloads.wait_stream(torch.cuda.current_stream(self.model.device))
            with torch.cuda.stream(self.downloads):
                fetched.copy_(vectors, non_blocking=True)
                done.record(self.downloads)
            vectors.record_stream(self.downloads)
        return functools.partial(self._finish, done, fetched)

    def embed_tokens(self, inputs: Inputs) -> Vectors:
        """Token vectors [rows, width, components] of padded inputs. Raises MemoryError."""
        with self.lock, torch.cuda.device(self.model.device):
            return self.model.embed_tokens(inputs)

    def _finish(self, done: torch.cuda.Event, fetched: Tensor) -> Vectors:
        """Wait for the vectors. A bound method: it keeps the graphs alive until the device is done with them."""
        done.synchronize()
        array: Vectors = fetched.numpy()
        return array

    def _upload(self, packed: npt.NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Copy packed inputs to the device while it computes."""
        now = torch.cuda.current_stream(self.model.device)
        with torch.cuda.stream(self.uploads):
            # torch keeps the pinned memory until the copy is done.
            there = torch.from_numpy(packed).pin_memory().to(self.model.device, non_blocking=True)
        now.wait_stream(self.uploads)
        # Its memory must not be reused before the computing stream is done with it.
        there.record_stream(now)
        return there.unbind()

    def _compute(self, inputs: dict[str, Tensor], full: bool) -> Tensor:
        mask = inputs["attention_mask"]
        if not self.takes_masks:
            return self.model.forward(**inputs)
        attended = None if full else attention_of(mask, dtype_of(self.model.precision))
        return self.model.forward(**(inputs | {"attention_mask": attended}), pooled_by=mask)

    def _graph_for(self, rows: int, width: int) -> Graph | None:
        """The graph of the smallest bucket that is large enough. None: there is none, or graphs are not used."""
        bucket = graph_bucket(rows, width) if self.uses_graphs else None
        if bucket is not None and bucket not in self.graphs:
            try:
                self.graphs[bucket] = self._capture(bucket)
            except RuntimeError as error:  # also out of memory: there may be enough without the graph
                self.uses_graphs, bucket = False, None
                log.warning("small inputs go without CUDA graphs from here on", reason=str(error))
        return None if bucket is None else self.graphs[bucket]

    def _replay(self, graph: Graph, packed: npt.NDArray[np.int64]) -> Tensor:
        filled = torch.from_numpy(fill_bucket(packed, tuple(graph.inputs.shape[1:])))
        # On the computing stream: the previous replay has read the buffer by then.
        graph.inputs.copy_(filled.pin_memory(), non_blocking=True)
        graph.graph.replay()
        # The next replay may overwrite them before they are fetched.
        return graph.vectors.clone()

    def switch_graphs(self, on: bool) -> None:
        """Use graphs or not. Raises RuntimeError if a capture fails."""
        self.graphs.clear()
        self.uses_graphs = on
        if on:
            bucket = GRAPH_ROWS[0], GRAPH_WIDTHS[0]
            with self.lock, torch.inference_mode(), torch.cuda.device(self.model.device):
                self.graphs[bucket] = self._capture(bucket)

    def _capture(self, bucket: tuple[int, int]) -> Graph:
        names = [*self.model.text.inputs, "attention_mask"]
        packed = torch.ones((len(names), *bucket), dtype=torch.int64, device=self.model.device)
        inputs = dict(zip(names, packed.unbind(), strict=True))
        computing = torch.cuda.current_stream(self.model.device)
        self.records.wait_stream(computing)
        with torch.cuda.stream(self.records):
            # Libraries choose kernels and allocate workspaces before the capture.
            for _ in range(3):
                self._compute(inputs, full=False)
        computing.wait_stream(self.records)
        with _RECORDING:
            return self._record(packed, inputs)

    def _record(self, packed: Tensor, inputs: dict[str, Tensor]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            # The outer context restores the stream, because a failed capture does not.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self.model.device)),
                # Another thread may load something meanwhile.
                torch.cuda.graph(graph, pool=self.pool, stream=self.records, capture_error_mode="thread_local"),
            ):
                vectors = self._compute(inputs, full=False)
        except RuntimeError:
            # torch does not end the capture in its allocator, which would then defer frees for ever.
            with contextlib.suppress(RuntimeError):  # already ended
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)  # noqa: SLF001 (no public name)
            raise
        return Graph(graph=graph, inputs=packed, vectors=vectors)


def pack(inputs: Inputs) -> npt.NDArray[np.int64]:
    """All inputs as one array [inputs, rows, width], in order, for a single copy."""
    return np.stack(list(inputs.values()))


def graph_bucket(rows: int, width: int) -> tuple[int, int] | None:
    """The smallest bucket for these rows and width. None: there is none."""
    wide = next((each for each in GRAPH_WIDTHS if each >= width), None)
    many = next((each for each in GRAPH_ROWS if each >= rows), None)
    if wide is None or many is None or wide * many > GRAPH_TOKENS_MAX:
        return None
    return many, wide


def fill_bucket(packed: npt.NDArray[np.int64], bucket: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Pad packed inputs, the mask last, to a bucket's size. Added rows attend to their first token."""
    inputs, rows, width = packed.shape
    filled = np.zeros((inputs, *bucket), dtype=np.int64)
    filled[:, :rows, :width] = packed
    filled[-1, rows:, 0] = 1
    return filled


def attention_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A padding mask [rows, width] as scaled_dot_product_attention adds it to scores: [rows, 1, 1, width].

    Attention would convert a boolean mask to this form in each layer.
    """
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask == 0, -torch.inf)
    return added[:, None, None, :]


def trial_inputs(text: TextInput, rows: int, width: int) -> Inputs:
    """Inputs of that shape, made of a sentence. The last of several rows is half as long as the others."""
    sentence = text.pad(text.tokenise(TRIAL_TEXTS[:1]), [0])
    inputs = {name: np.resize(array, (rows, width)) for name, array in sentence.items()}
    if rows > 1:
        inputs["attention_mask"][-1, width // 2 :] = 0
    return inputs


def seconds_of(model: CudaEmbedModel, inputs: Inputs) -> float:
    """The median time of a forward pass with its copies."""
    taken = []
    for _ in range(TRIAL_RUNS):
        start = time.perf_counter()
        model.embed(inputs)
        taken.append(time.perf_counter() - start)
    return float(np.median(taken))


def speed_up(model: EmbedModel, *, compiled: bool) -> tuple[CudaEmbedModel, dict[str, str]]:
    """Try each optimisation, and keep those with the same vectors that are faster. Returns facts for people."""
    uploads, downloads, records = (torch.cuda.Stream(model.device) for _ in range(3))  # type: ignore[no-untyped-call]
    fast = CudaEmbedModel(model=model, uploads=uploads, downloads=downloads, records=records)
    facts = {"attention": str(getattr(model.transformer.config, "_attn_implementation", "the model's own"))}
    # With padding, and without.
    trials = [trial_inputs(model.text, rows, 16) for rows in (2, 1)]
    expected = [fast.embed(inputs) for inputs in trials]

    def attempt(what: str, switch: Callable[[bool], None], inputs: Inputs | None) -> None:
        """Keep an optimisation if its vectors are the same and, if `inputs` are given, it is faster on them."""
        before_s = seconds_of(fast, inputs) if inputs is not None else 0.0
        try:
            switch(True)
            found = [fast.embed(inputs) for inputs in trials]
            off = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))
            after_s = seconds_of(fast, inputs) if inputs is not None else 0.0
            times = f"{before_s * 1e3:.2f} ms without, {after_s * 1e3:.2f} ms with" if inputs is not None else "used"
            kept = off <= TOLERANCE[model.precision] and (inputs is None or after_s * FASTER_BY < before_s)
            facts[what] = times if kept else f"not used: {times}, vectors differ by {off:.1e}"
        except (RuntimeError, TypeError, ValueError, AttributeError, ImportError) as error:
            kept = False
            facts[what] = f"not used: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        if not kept:
            switch(False)
            log.info("an optimisation is not used", what=what, reason=facts[what])

    attempt("masks as they are", lambda on: setattr(fast, "takes_masks", on), None)
    if compiled:
        eager = model.transformer
        faster = torch.compile(eager, dynamic=True)
        shape = trial_inputs(model.text, *LARGE_TRIAL)
        attempt("torch.compile", lambda on: setattr(model, "transformer", faster if on else eager), shape)
    attempt("CUDA graphs", fast.switch_graphs, trial_inputs(model.text, *SMALL_TRIAL))
    return fast, facts
