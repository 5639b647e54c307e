"""Values as payloads and results: bytes, JSON, and MessagePack with NumPy arrays."""

import json
import math
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multigpu._encoding import ARRAY, JSON, MSGPACK, RAW, decode, encode

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(0, 9) | st.booleans(), inner),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        keys = [*map(repr, a)]  # 1 is equal to True
        return keys == [*map(repr, b)] and all(same(a[key], b[key]) for key in a)
    return bool(a == b) or (a != a and b != b)  # noqa: PLR0124  NaN


@given(VALUES)
def test_values_return_as_they_were(value: Any) -> None:
    data, content_type = encode(value)
    assert content_type in (RAW, JSON, MSGPACK)
    assert same(value, decode(data, content_type))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.arange(6, dtype=">i2")[::2],
        np.array([1.5, math.nan], np.float16),
        np.array(7),
        np.zeros((0, 3)),
        np.array([True, False]),
        np.array(["é", "longer"]),
        np.array([1 + 2j]),
        np.array(["2026-01-01"], "M8[D]"),
        np.array([b"ab"], "V2"),
        np.asfortranarray(np.arange(4).reshape(2, 2)),
    ],
)
def test_arrays_return_with_dtype_and_shape(array: Any) -> None:
    data, content_type = encode({"a": [array], "b": b"bytes"})
    assert content_type == MSGPACK
    found = decode(data, content_type)["a"][0]
    assert same(np.ascontiguousarray(array).reshape(array.shape), found)
    assert not found.flags.writeable


def test_what_json_can_hold_is_json() -> None:
    assert encode({"a": [1, "é", None]}) == ('{"a":[1,"é",null]}'.encode(), JSON)
    assert encode(b"x") == (b"x", RAW)
    assert encode(bytearray(b"x")) == (b"x", RAW)
    assert json.loads(encode([])[0]) == []
    assert encode(math.nan)[1] == MSGPACK
    assert encode(np.float32(1.5)) == (msgpack.packb(1.5), MSGPACK)


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, "\ud800", np.array([object()]), np.zeros(1, [("a", "i4")]), 1j,
     {"a": {(1, 2): 3}}, np.ma.array([1, 2], mask=[False, True])],
)  # fmt: skip
def test_other_values_are_errors(value: Any) -> None:
    with pytest.raises(ValueError, match="a value must be bytes, a JSON value, or made of these and NumPy arrays"):
        encode(value)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_arrays_of_types_that_numpy_lacks_are_errors(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.ones(3, getattr(ml_dtypes, name))
    with pytest.raises(ValueError, match=rf"an array of {name}, which NumPy lacks: send array\.astype\('float32'\)"):
        encode({"a": array})
    assert decode(*encode(array.astype("float32"))).tolist() == [1.0, 1.0, 1.0]
    assert decode(*encode(array[0])) == 1.0


def array(dtype: Any, shape: Any, data: bytes) -> bytes:
    packed: bytes = msgpack.packb(msgpack.ExtType(ARRAY, msgpack.packb([dtype, shape]) + data))
    return packed


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x81", b"\xc7\x00\x05", array("<f4", [2], b"1234"), array("O", [1], b"12345678"),
        array("<f4", [1 << 62], b""), array("<f4", [-1], b"1234"), array("none", [1], b"x"), array(7, [1], b"x"),
        array("<f4", "no shape", b"x"), array("i4,f4", [1], b"12345678"), msgpack.packb(msgpack.ExtType(ARRAY, b"")),
        msgpack.packb([1]) + b"more",
    ],
)  # fmt: skip
def test_damaged_bytes_are_errors(data: bytes) -> None:
    with pytest.raises(ValueError, match="this is not MessagePack"):
        decode(data, MSGPACK)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_error(data: bytes) -> None:
    try:
        decode(data, MSGPACK)
    except ValueError as error:
        assert "this is not MessagePack" in str(error)
