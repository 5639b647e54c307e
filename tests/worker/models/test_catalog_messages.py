"""A worker's catalog has limits: models that do not fit are left out, and an entry says so."""

import pytest
from multigpu._transport.names import HELLO_BYTES_MAX, MODELS_MAX
from multigpu.v1 import model_pb2
from multigpu_worker.models.messages import LEFT_OUT, fitting


@pytest.mark.parametrize(("count", "error"), [(MODELS_MAX + 100, ""), (400, "x" * 500)])
def test_models_that_do_not_fit_are_left_out_and_an_entry_names_some(count: int, error: str) -> None:
    models = [model_pb2.Model(name=f"m{number:04}", kind="infer", current=True) for number in range(count)]
    models += [model_pb2.Model(name=f"broken{number:0180}", error=error) for number in range(400 if error else 1)]
    total = len(models)
    offers, kept = fitting([("infer", [m.name for m in models if m.kind])], models)
    *served, last = kept
    assert last.name == LEFT_OUT
    assert last.error.startswith(f"{total - len(served)} models are not offered, because")
    assert f"The first: {'broken' if error else 'm'}" in last.error
    assert error[:100] in last.error
    assert len(last.error) < 5 * 320 + 200
    assert len(kept) <= MODELS_MAX
    assert sum(model.ByteSize() for model in kept) < HELLO_BYTES_MAX
    assert [set(names) for _, names in offers] == [{m.name for m in served if m.kind}]


def test_inputs_and_outputs_are_left_out_before_models() -> None:
    tensors = [
        model_pb2.TensorSpec(name=f"a long name of a tensor, number {number}", dtype="int8") for number in range(90)
    ]
    models = [
        model_pb2.Model(name=f"m{number}", kind="infer", inputs=tensors, outputs=tensors) for number in range(100)
    ]
    kept = fitting([("infer", [])], models)[1]
    assert [each.name for each in kept] == [f"m{number}" for number in range(100)]
    assert not any(each.inputs or each.outputs for each in kept)


def test_a_catalog_that_fits_is_complete() -> None:
    models = [model_pb2.Model(name=f"m{number}", kind="infer") for number in range(MODELS_MAX)]
    assert fitting([("infer", [])], models)[1] == models
