"""Payloads and results as Python values: bytes travel as they are, JSON values as JSON, and values that hold bytes or
NumPy arrays, or have keys other than str, as MessagePack.

The master reads none of them; a content type beside the bytes says which it is, empty for raw bytes. An array is the
MessagePack extension type 1: its NumPy dtype and its shape as MessagePack, then its elements in C order. The arguments
of a call with other than one positional argument are MessagePack: [[positional …], {keyword: …}].

Other values are pickled, and pickles are read, only in a process that called `allow_pickle`.
"""

import json
import pickle
from collections.abc import Iterator
from typing import Any

RAW = ""
JSON = "application/json"
MSGPACK = "application/vnd.msgpack"
CALL = "application/vnd.multigpu.call"
PICKLE = "application/vnd.multigpu.pickle"
ARRAY = 1

# One encoder for all calls: json.dumps builds a new one whenever an option differs from its defaults.
_encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


_pickle_allowed = False


def allow_pickle(allowed: bool = True) -> None:
    """Lets this process send values of any class as pickles, and read the pickles that it receives.

    A pickle can run any code in the process that reads it. So call this only in a client that trusts all workers of its
    fleet; workers that trust all clients are started with `--allow-pickle`, which does the same. The modules of the
    classes must be importable on both sides.
    """
    global _pickle_allowed  # noqa: PLW0603  it is the process that runs the code
    _pickle_allowed = allowed


class Arguments:
    """The arguments of a handler as one payload, for calls by its kind:
    `client.run("resize", multigpu.Arguments(picture, width=640))`. A single positional one needs none.
    """

    __slots__ = ("args", "kwargs")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


def encode(value: Any) -> tuple[bytes, str]:
    """The payload and content type of a value. ValueError: it can't be encoded."""
    try:
        return _encode(value)
    except ValueError:
        if not _pickle_allowed:
            raise
    try:
        return pickle.dumps(value), PICKLE
    except Exception as error:  # of the value's class
        raise ValueError(f"this {type(value).__name__} can't be pickled: {error}") from error


def _encode(value: Any) -> tuple[bytes, str]:
    if type(value) is Arguments:
        return _pack([value.args, value.kwargs]), CALL
    if isinstance(value, bytes):
        return value, RAW
    if isinstance(value, bytearray | memoryview):
        return bytes(value), RAW
    try:
        if not any(True for _ in _keys(value)):
            return _encode_json(value).encode(), JSON
    except (TypeError, ValueError, RecursionError):
        pass
    return _pack(value), MSGPACK


def _keys(value: Any) -> Iterator[Any]:
    """The keys in a value that are no str. JSON would make strings of them."""
    if isinstance(value, dict):
        yield from (key for key in value if not isinstance(key, str))
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for each in value:
        if isinstance(each, dict | list | tuple):
            yield from _keys(each)


def decode(data: bytes, content_type: str) -> Any:
    """The value of a payload or result; bytes stay bytes. ValueError: it is not what its content type says."""
    if content_type == JSON:
        return json.loads(data)
    if content_type == CALL:
        return _arguments(_unpack(data))
    if content_type == PICKLE:
        return _unpickle(data)
    return _unpack(data) if content_type == MSGPACK else data


def _unpickle(data: bytes) -> Any:
    if not _pickle_allowed:
        remedy = "multigpu.allow_pickle(), or mgpu-worker --allow-pickle, reads it where its sender is trusted"
        raise ValueError(f"it is a pickle, which can run any code: {remedy}")
    try:
        return pickle.loads(data)  # noqa: S301  allowed
    except Exception as error:  # of the classes in it
        raise ValueError(f"the pickle can't be read: {error!r}") from error


def _arguments(value: Any) -> Arguments:
    match value:
        case [list(args), dict(kwargs)] if all(isinstance(name, str) for name in kwargs):
            return Arguments(*args, **kwargs)
    raise ValueError("these are not the arguments of a call: [[positional …], {keyword: …}]")


def _pack(value: Any) -> bytes:
    import msgpack  # noqa: PLC0415  few values need it

    try:
        packed: bytes = msgpack.packb(value, default=_pack_array)
        _check_keys(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"a value must be bytes, a JSON value, or made of these and NumPy arrays, and this {type(value).__name__} "
            f"is not: {error} (multigpu.allow_pickle() and mgpu-worker --allow-pickle take others)"
        ) from error
    return packed


def _check_keys(value: Any) -> None:
    """MessagePack would make a list of a tuple, which can't be a key again."""
    if any(isinstance(key, tuple) for key in _keys(value)):
        raise TypeError("a key can't be a tuple")


def _pack_array(value: Any) -> Any:
    import msgpack  # noqa: PLC0415  as above
    import numpy as np  # noqa: PLC0415

    if isinstance(value, np.generic):
        return value.item()
    array = isinstance(value, np.ndarray)
    if not array or value.dtype.hasobject or value.dtype.names or isinstance(value, np.ma.MaskedArray):
        what = f"{type(value).__name__} of {value.dtype}" if array else f"{type(value).__name__} {value!r:.100}"
        raise TypeError(f"can't hold {what}")
    if not _is_portable(value.dtype):
        raise TypeError(f"can't hold an array of {value.dtype}, which NumPy lacks: send array.astype('float32')")
    return msgpack.ExtType(ARRAY, msgpack.packb([value.dtype.str, value.shape]) + value.tobytes())


def _is_portable(dtype: Any) -> bool:
    """Whether the receiver gets the same dtype from its name. That of ml_dtypes.bfloat16 means raw bytes."""
    import numpy as np  # noqa: PLC0415  as above

    try:
        return bool(np.dtype(dtype.str) == dtype)
    except TypeError:
        return False


def _unpack(data: bytes) -> Any:
    import msgpack  # noqa: PLC0415  as above

    try:
        return msgpack.unpackb(data, ext_hook=_unpack_array, strict_map_key=False)
    except Exception as error:  # its errors have no common class
        raise ValueError(f"this is not MessagePack: {error!r}") from error


def _unpack_array(code: int, data: bytes) -> Any:
    """A read-only view of the bytes."""
    import msgpack  # noqa: PLC0415  as above
    import numpy as np  # noqa: PLC0415

    if code != ARRAY:
        raise ValueError(f"extension type {code}")
    header = msgpack.Unpacker()
    header.feed(data[:1024])
    (name, shape), at = header.unpack(), header.tell()
    dtype = np.dtype(name)
    if dtype.hasobject or dtype.names or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype} with the shape {shape}")
    return np.ndarray(shape, dtype, buffer=data, offset=at)
