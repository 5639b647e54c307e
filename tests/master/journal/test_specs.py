"""Task specs: interning and limits."""

import gc

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from multigpu.v1 import task_pb2
from multigpu_master.errors import InvalidMessageError
from multigpu_master.wire import specs as wire_specs
from multigpu_master.wire.specs import SpecReader, SpecsFullError


def large(n: int) -> task_pb2.TaskSpec:
    return task_pb2.TaskSpec(kind="echo", parameters={"n": str(n), "pad": "x" * 10_000})


def test_equal_specs_share_one_object() -> None:
    reader = SpecReader()
    assert reader.read(large(1)) is reader.read(large(1))
    assert reader.restore(reader.read(large(1)).wire) == reader.read(large(1))


def test_living_large_specs_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_specs, "LARGE_BYTES_MAX", 50_000)
    reader = SpecReader()
    kept = [reader.read(large(n)) for n in range(4)]
    with pytest.raises(SpecsFullError, match=r"in queue .default. would take more than 50000 bytes: share parameters"):
        reader.read(large(4))
    assert reader.read(large(0)) is kept[0]
    other = large(4)
    other.queue = "other"
    assert reader.read(other), "each queue has its own"
    assert reader.read(task_pb2.TaskSpec(kind="small"))
    kept.pop()
    gc.collect()
    assert reader.read(large(4))


def test_large_specs_from_the_journal_are_accepted_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [SpecReader().read(large(n)).wire for n in range(6)]
    monkeypatch.setattr(wire_specs, "LARGE_BYTES_MAX", 50_000)
    reader = SpecReader()
    kept = [reader.restore(wire) for wire in specs]
    with pytest.raises(SpecsFullError):
        reader.read(large(6))
    assert len(kept) == 6


def test_the_result_ttl_is_limited() -> None:
    spec = task_pb2.TaskSpec(kind="echo")
    spec.result_ttl.FromSeconds(100_000)
    assert SpecReader(result_ttl_max_s=100_000.0).read(spec).result_ttl_s == 100_000.0
    with pytest.raises(InvalidMessageError, match=r"at most 90000 s are allowed .*result_ttl_max_s"):
        SpecReader(result_ttl_max_s=90_000.0).read(spec)


def test_backoff_max_is_at_least_backoff_initial() -> None:
    spec = task_pb2.TaskSpec(kind="echo")
    spec.backoff_initial.FromSeconds(40)
    assert SpecReader().read(spec).backoff_max_s == 40.0
    spec.backoff_max.FromSeconds(40)
    assert SpecReader().read(spec).backoff_max_s == 40.0
    spec.backoff_max.FromSeconds(39)
    with pytest.raises(InvalidMessageError, match=r"backoff_max is 39 s; it must be at least backoff_initial, .* 40 s"):
        SpecReader().read(spec)
    # The journal of an earlier version may hold it.
    assert SpecReader().restore(spec.SerializeToString(deterministic=True)).backoff_max_s == 40.0


def test_a_deadline_is_converted_to_the_masters_clock() -> None:
    skew_s = [-3600.0]
    reader = SpecReader(skew=lambda: skew_s[0])
    message = task_pb2.TaskSpec(kind="echo", deadline=Timestamp(seconds=10_000))
    spec = reader.read(message)
    assert spec.deadline_s == 6400.0
    skew_s[0] = 0.0
    assert reader.read(message) is spec, "the first reading counts, for as long as the spec lives"
    assert reader.message(spec).deadline.seconds == 10_000, "what is told again is the client's"
    wire = spec.wire
    del spec
    gc.collect()
    assert reader.restore(wire).deadline_s == 10_000.0
