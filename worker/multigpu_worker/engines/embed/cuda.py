"""An embedding model on a GPU: the same numbers as EmbedModel's, and the device never waits for the host.

- `begin` hands a micro-batch to the device and returns; its vectors are fetched when the next one is on its way. Inputs
  and vectors cross the bus by pinned memory, on streams of their own.
- transformers looks into the attention mask whether it masks anything, and waits for the device to say. Here the host
  says: no mask where nothing is padded, else a mask in the form that goes to the attention as it is, made once for all
  layers. One padded pair of sentences at load decides whether the model takes that; if not, it gets the mask as ever.
- Small inputs are a hundred short kernels, and the host takes longer to launch them than the device to run them. CUDA
  graphs launch them at once: one for each bucket of rows and width, made when the bucket first comes, if a trial at
  load was faster by graph. They share one pool of memory, and one stream to be recorded on: on another stream each
  would get workspaces of its own from the libraries. Where one can't be had, the model goes on without.
- `torch.compile` is tried where model.toml asks for it (`compile = "try"` under parameters: it takes a minute) and kept
  where it is faster.

The attention is torch's scaled_dot_product_attention, transformers' own choice.
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

# Buckets of widths and rows that have a graph, and padded tokens from which on launching is not what takes the time.
GRAPH_WIDTHS = (16, 32, 64, 128, 256)
GRAPH_ROWS = (1, 2, 4, 8, 16, 32)
GRAPH_TOKENS_MAX = 2048
# What is tried at load, as rows and width: launching decides; arithmetic decides.
SMALL_TRIAL, LARGE_TRIAL = (1, 16), (64, 128)
TRIAL_RUNS = 20
# A way that is faster by less is not worth its memory.
FASTER_BY = 1.05
# Largest difference of a component between two ways through one model, as a share of the largest component, by what
# its arithmetic rounds to. A mask that is not heeded makes 0.6 with MiniLM.
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}
# Recording a graph waits for the whole device, which may not be waited for while another graph is recorded.
_RECORDING = threading.Lock()

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Graph:
    """A captured forward pass: what is put in, packed as `pack` does, and where its vectors are found."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    vectors: Tensor


@dataclass(slots=True, kw_only=True)
class CudaEmbedModel:
    """An EmbedBackend that can be handed the next micro-batch before the last one is done.

    Any thread may call it: what serves until a plan does is compared with the plan by another thread.
    """

    model: EmbedModel
    uploads: torch.cuda.Stream
    downloads: torch.cuda.Stream
    records: torch.cuda.Stream
    # The attention takes masks as they are.
    takes_masks: bool = False
    uses_graphs: bool = False
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict)
    # Memory that all graphs share: they run one after the other.
    pool: Any = None
    # Held while work is handed to the device: graphs have one place for their inputs.
    lock: threading.Lock = field(default_factory=threading.Lock)

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
    def pads(self) -> bool:
        return self.model.pads

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

    def _finish(self, done: torch.cuda.Event, fetched: Tensor) -> Vectors:
        """Bound, so that graphs live until the device is through with them, though another back end serves by then."""
        done.synchronize()
        array: Vectors = fetched.numpy()
        return array

    def _upload(self, packed: npt.NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Copy packed inputs while the device computes."""
        now = torch.cuda.current_stream(self.model.device)
        with torch.cuda.stream(self.uploads):
            # The page-locked copy is kept by torch until it has been read.
            there = torch.from_numpy(packed).pin_memory().to(self.model.device, non_blocking=True)
        now.wait_stream(self.uploads)
        # Its memory is not given to others before the computing stream is through with it.
        there.record_stream(now)
        return there.unbind()

    def _compute(self, inputs: dict[str, Tensor], full: bool) -> Tensor:
        mask = inputs["attention_mask"]
        if not self.takes_masks:
            return self.model.forward(**inputs)
        attended = None if full else attention_of(mask, dtype_of(self.model.precision))
        return self.model.forward(**(inputs | {"attention_mask": attended}), pooled_by=mask)

    def _graph_for(self, rows: int, width: int) -> Graph | None:
        """The graph of the smallest bucket that holds so much. None: there is no such bucket, or no graph to be had."""
        bucket = graph_bucket(rows, width) if self.uses_graphs else None
        if bucket is not None and bucket not in self.graphs:
            try:
                self.graphs[bucket] = self._capture(bucket)
            except RuntimeError as error:  # too little memory too: it is enough without, perhaps
                self.uses_graphs, bucket = False, None
                log.warning("small inputs go without CUDA graphs from here on", reason=str(error))
        return None if bucket is None else self.graphs[bucket]

    def _replay(self, graph: Graph, packed: npt.NDArray[np.int64]) -> Tensor:
        filled = torch.from_numpy(fill_bucket(packed, tuple(graph.inputs.shape[1:])))
        # In the computing stream's order: the graph before this one has read them.
        graph.inputs.copy_(filled.pin_memory(), non_blocking=True)
        graph.graph.replay()
        # The next replay may come before these were fetched.
        return graph.vectors.clone()

    def switch_graphs(self, on: bool) -> None:
        """Use graphs or not. Raises RuntimeError: none can be captured."""
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
            # Libraries choose their kernels and take their workspaces before anything is recorded.
            for _ in range(3):
                self._compute(inputs, full=False)
        computing.wait_stream(self.records)
        with _RECORDING:
            return self._record(packed, inputs)

    def _record(self, packed: Tensor, inputs: dict[str, Tensor]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            # The outer one, because a recording that fails leaves its stream behind as the current one.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self.model.device)),
                # Another thread may be loading something meanwhile.
                torch.cuda.graph(graph, pool=self.pool, stream=self.records, capture_error_mode="thread_local"),
            ):
                vectors = self._compute(inputs, full=False)
        except RuntimeError:
            # torch's allocator isn't told, and would for ever put off what it does not do while something is recorded.
            with contextlib.suppress(RuntimeError):  # it was told
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)  # noqa: SLF001 (no public name)
            raise
        return Graph(graph=graph, inputs=packed, vectors=vectors)


def pack(inputs: Inputs) -> npt.NDArray[np.int64]:
    """All inputs as one array [inputs, rows, width], in their order: they cross the bus by one copy."""
    return np.stack(list(inputs.values()))


def graph_bucket(rows: int, width: int) -> tuple[int, int] | None:
    """The smallest bucket that holds so many rows of that width; None: none does."""
    wide = next((each for each in GRAPH_WIDTHS if each >= width), None)
    many = next((each for each in GRAPH_ROWS if each >= rows), None)
    if wide is None or many is None or wide * many > GRAPH_TOKENS_MAX:
        return None
    return many, wide


def fill_bucket(packed: npt.NDArray[np.int64], bucket: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Packed inputs, the mask last, padded to a bucket's size. Rows that are made up attend to their first token."""
    inputs, rows, width = packed.shape
    filled = np.zeros((inputs, *bucket), dtype=np.int64)
    filled[:, :rows, :width] = packed
    filled[-1, rows:, 0] = 1
    return filled


def attention_of(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A padding mask [rows, width] in the form that scaled_dot_product_attention adds to scores: [rows, 1, 1, width].

    It is the same for all queries. Of a mask of truth values attention makes this anew in each layer.
    """
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask == 0, -torch.inf)
    return added[:, None, None, :]


def trial_inputs(text: TextInput, rows: int, width: int) -> Inputs:
    """Inputs of that shape, made of a sentence; the last row is half as long as the others if there is another."""
    sentence = text.pad(text.tokenise(TRIAL_TEXTS[:1]), [0])
    inputs = {name: np.resize(array, (rows, width)) for name, array in sentence.items()}
    if rows > 1:
        inputs["attention_mask"][-1, width // 2 :] = 0
    return inputs


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
    uploads, downloads, records = (torch.cuda.Stream(model.device) for _ in range(3))  # type: ignore[no-untyped-call]
    fast = CudaEmbedModel(model=model, uploads=uploads, downloads=downloads, records=records)
    facts = {"attention": str(getattr(model.transformer.config, "_attn_implementation", "the model's own"))}
    # One with padding, one without.
    trials = [trial_inputs(model.text, rows, 16) for rows in (2, 1)]
    expected = [fast.embed(inputs) for inputs in trials]

    def attempt(what: str, switch: Callable[[bool], None], inputs: Inputs | None) -> None:
        """Keep a way if it gives the same vectors and, where `inputs` are given, is faster on them."""
        before_s = seconds_of(fast, inputs) if inputs is not None else 0.0
        try:
            switch(True)
            found = [fast.embed(inputs) for inputs in trials]
            off = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))
            after_s = seconds_of(fast, inputs) if inputs is not None else 0.0
            told = f"{before_s * 1e3:.2f} ms without, {after_s * 1e3:.2f} ms with" if inputs is not None else "used"
            kept = off <= TOLERANCE[model.precision] and (inputs is None or after_s * FASTER_BY < before_s)
            facts[what] = told if kept else f"not used: {told}, vectors differ by {off:.1e}"
        except (RuntimeError, TypeError, ValueError, AttributeError, ImportError) as error:
            kept = False
            facts[what] = f"not used: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        if not kept:
            switch(False)
            log.info("a faster way is not taken", way=what, reason=facts[what])

    attempt("masks as they are", lambda on: setattr(fast, "takes_masks", on), None)
    if compiled:
        plain = model.transformer
        faster = torch.compile(plain, dynamic=True)
        shape = trial_inputs(model.text, *LARGE_TRIAL)
        attempt("torch.compile", lambda on: setattr(model, "transformer", faster if on else plain), shape)
    attempt("CUDA graphs", fast.switch_graphs, trial_inputs(model.text, *SMALL_TRIAL))
    return fast, facts
