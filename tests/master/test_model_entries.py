"""What ListModels shows of models that several workers offer."""

import asyncio

import pytest
from multigpu.v1 import model_pb2
from multigpu_master.core.workers.fleet import Fleet
from multigpu_master.core.workers.info import Model, WorkerInfo
from multigpu_master.rpc import queries
from multigpu_master.rpc.admin.models import _model_entries


async def test_a_worker_that_has_not_hashed_the_files_yet_takes_no_digest_away() -> None:
    """Files with another digest were then shown as the same model."""
    fleet = Fleet(0.8)
    offers = [("a", "X", 10), ("b", "", 20), ("c", "Y", 10)]
    for worker_id, digest, memory_bytes in offers:
        wire = model_pb2.Model(name="m", digest=digest, memory_bytes=memory_bytes).SerializeToString()
        fleet.register(WorkerInfo(worker_id=worker_id, models=(Model(name="m", version="1", wire=wire),)))
    entries = await _model_entries(fleet.workers.values(), "")
    assert [(e.model.digest, e.model.memory_bytes, list(e.worker_ids)) for e in entries] == [
        ("X", 20, ["a", "b"]),
        ("Y", 10, ["c"]),
    ]


async def test_workers_that_run_a_model_on_different_engines_have_entries_of_their_own() -> None:
    """A trial of engines may have another result on each host, and one row showed one of them for all."""
    fleet = Fleet(0.8)
    for worker_id, engine, facts in (("a", "torch", {"x": ""}), ("b", "torch or onnx", {}), ("c", "onnx", {"x": ""})):
        wire = model_pb2.Model(name="m", engine=engine, facts=facts).SerializeToString()
        fleet.register(WorkerInfo(worker_id=worker_id, models=(Model(name="m", version="1", wire=wire),)))
    entries = await _model_entries(fleet.workers.values(), "")
    assert [(e.model.engine, list(e.worker_ids)) for e in entries] == [("torch", ["a", "b"]), ("onnx", ["c"])]


async def test_other_calls_run_while_models_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "SLICE_S", 0.0)
    fleet = Fleet(0.8)
    for number in range(3):
        fleet.register(WorkerInfo(worker_id=f"w{number}", models=(Model(name="m", version="1"),)))
    listing = asyncio.create_task(_model_entries(fleet.workers.values(), ""))
    await asyncio.sleep(0)
    assert not listing.done()
    fleet.register(WorkerInfo(worker_id="another"))
    (entry,) = await listing
    assert list(entry.worker_ids) == ["w0", "w1", "w2"]
