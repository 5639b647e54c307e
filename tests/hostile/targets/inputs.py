"""Hostile messages: extreme values in every field, damaged messages and random bytes.

Messages are made from their descriptors, so new fields are covered at once. Values come from small pools, so that they
match: a cancel names a task that was just submitted. All randomness comes from one `random.Random`: a seed and a number
reproduce an input.
"""

import struct
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from multigpu_master.rpc.worker_service import PROTOCOL_VERSION

INTS = [0, 1, 2, 3, 5, 6, 100, 1000, 1001, 2**16, 2**31 - 1, -1, -(2**31)]
LONGS = [0, 1, 2, 3, 10, 2**31, 2**53, 2**62, 2**63 - 1, -1, -(2**62), -(2**63)]
UNSIGNED = [0, 1, 2, 3, 10, 2**32 - 1]
UNSIGNED_LONGS = [0, 1, 2, 3, 10, 2**33 + 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
DOUBLES = [0.0, -0.0, 0.5, 1.0, -1.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan")]
WORDS = [
    *("echo", "a", "b", "w", "w0", "default", "model", "cpu", "auto", "static_partition", "task_type", "nobody's"),
    *("", "", " ", "\0", "a\0b", "\n", "%s%n", "{}", "../../etc/passwd", "'; DROP TABLE task; --", "ﷺ", "é", "e\u0301"),
    *("\u202e", "\ud7ff", "\U0010ffff", "😀" * 33, "x" * 128, "x" * 129, "x" * 257, "é" * 128, "x" * 2048),
    "x" * 70_000,
    *("p.", "p.0", "p.1", "p.999999999999999999", "p.9999999999999999999", "p.-1", "p.٣", "w.1", "1", "p.1 "),
    *("w.", "w..", "w..1", "w.a.", "w.a.1", "w.a.-1", "w.a.b.1", "w." + "a" * 5000 + ".1"),
    *("00-" + "1" * 32 + "-" + "2" * 16 + "-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-x-y-z"),
]
# Mostly used for fields of these names, to match existing objects.
LIKELY = {
    "worker_id": ["a", "b", "c"],
    "queue": ["", "default", "a"],
    "kind": ["echo", "a"],
    "model": ["", "", "model"],
    "request_id": ["r0", "r1", "r2", "r3"],
    "request_ids": ["r0", "r1", "r2", "r3"],
    "cancel_request_ids": ["r0", "r1", "r2", "r3"],
    "parameters": ["priority", "timeout", "binary_data", "shared_memory_region", "sequence_id"],
    "model_name": ["model", "a"],
    "datatype": ["FP32", "INT64", "BYTES", "BOOL", "BF16", "FP16"],
    "strategy": ["auto", "static_partition", "least_loaded", "memory_usage", "task_type", "round_robin"],
    "page_token": ["p.0", "p.1", "p.999999999999999999"],
    "cursor": ["p.0", "p.1", "p.999999999999999999", "w.0123456789abcdef.1"],
    "traceparent": ["00-" + "1" * 32 + "-" + "2" * 16 + "-01"],
}
BYTES = [b"", b"x", b"\0", b"\xff" * 9, b"\x0a" * 40, b"{}", bytes(1000), bytes(40_000)]
POOLS: dict[int, Sequence[Any]] = {
    FieldDescriptor.TYPE_BYTES: BYTES,
    FieldDescriptor.TYPE_BOOL: (False, True),
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT), DOUBLES),
    FieldDescriptor.TYPE_ENUM: (0, 1, 2, 3, 4, 5, 6, 99, -1, 2**31 - 1),
    FieldDescriptor.TYPE_INT32: INTS,
    FieldDescriptor.TYPE_INT64: LONGS,
    **dict.fromkeys((FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_FIXED32), UNSIGNED),
    **dict.fromkeys((FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_FIXED64), UNSIGNED_LONGS),
}
# Valid values: a message with few invalid values gets further.
TAME_WORDS = ["a", "b", "echo", "x"]
TAME_NUMBERS = [0, 0, 1, 2, 3]
TAME_FIELDS = {
    "google.protobuf.Timestamp.seconds": 4_000_000_000,
    "google.protobuf.Duration.seconds": 1,
    "multigpu.v1.Hello.protocol_version": PROTOCOL_VERSION,
}
TAME_POOLS: dict[int, Sequence[Any]] = {
    FieldDescriptor.TYPE_BYTES: [b"x"],
    FieldDescriptor.TYPE_BOOL: (False, True),
    **dict.fromkeys((FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT), (0.5,)),
}
WILD_SHARE = 0.03
DEPTH_MAX = 6


class Maker:
    """Makes inputs. `ids`: existing task and lease ids, for later inputs."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.ids: deque[int] = deque([1], maxlen=64)
        self._tame = False

    def message(self, descriptor: Any, **fields: Any) -> Any:
        """A message with extreme values, except for the given fields."""
        message = GetMessageClass(descriptor)(**fields)
        self._tame = self.rng.random() < 0.6
        self._fill(message, 0, set(fields))
        return message

    def word(self) -> str:
        return self.rng.choice(WORDS) if self.rng.random() < 0.95 else self._noise_word()

    def damaged(self, data: bytes) -> bytes:
        """The bytes with some flipped, cut, doubled, inserted or replaced."""
        rng, out = self.rng, bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(out) + 1)
            match rng.randrange(6):
                case 0 if out:
                    out[at % len(out)] ^= 1 << rng.randrange(8)
                case 1:
                    del out[at:]
                case 2:
                    del out[at : at + rng.randrange(1, 9)]
                case 3:
                    out[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 4:
                    out[at:at] = out[at // 2 : at]
                case _:
                    # A length beyond the end.
                    out[at:at] = b"\xff\xff\xff\xff\x0f"
        return bytes(out[: 1 << 20])

    def noise(self) -> bytes:
        return self.rng.randbytes(self.rng.choice((0, 1, 2, 7, 40, 300)))

    def wire(self, descriptor: Any, **fields: Any) -> bytes:
        """Bytes where such a message is expected: three in five are one."""
        kind = self.rng.random()
        if kind < 0.1:
            return self.noise()
        data: bytes = self.message(descriptor, **fields).SerializeToString()
        return data if kind < 0.7 else self.damaged(data)

    def _noise_word(self) -> str:
        letters = ("abc", "\0\x01\x7f", "äßﬁ", "💥💣", "/.:*?")
        return "".join(self.rng.choice(self.rng.choice(letters)) for _ in range(self.rng.randrange(40)))

    def _fill(self, message: Message, depth: int, given: set[str]) -> None:
        rng = self.rng
        share = rng.choice((0.1, 0.4, 0.8))
        for field in message.DESCRIPTOR.fields:
            if field.name in given or rng.random() > share:
                continue
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                self._fill_map(getattr(message, field.name), field.message_type.fields_by_name["value"], depth)
            elif field.is_repeated:
                self._repeat(message, field, depth)
            elif field.message_type is not None:
                if depth < DEPTH_MAX:
                    child = getattr(message, field.name)
                    child.SetInParent()
                    self._fill(child, depth + 1, set())
            else:
                setattr(message, field.name, self._scalar(field))

    def _fill_map(self, target: Any, value: Any, depth: int) -> None:
        rng = self.rng
        for _ in range(0 if self._tame else rng.choice((0, 1, 3, 70))):
            key = rng.choice(LIKELY["parameters"]) if rng.random() < 0.5 else self.word() + rng.choice(("", "1", "2"))
            if value.message_type is None:
                target[key] = self.word()
            elif depth < DEPTH_MAX:
                self._fill(target[key], depth + 1, set())

    def _repeat(self, message: Message, field: Any, depth: int) -> None:
        target = getattr(message, field.name)
        for _ in range(self.rng.choice((0, 1, 1, 2, 5, 30 if depth < 2 else 1))):
            if field.message_type is None:
                target.append(self._scalar(field))
            elif depth < DEPTH_MAX:
                self._fill(target.add(), depth + 1, set())

    def _scalar(self, field: Any) -> Any:
        rng = self.rng
        if field.name == "request_id" and rng.random() < 0.5:
            return f"q{rng.getrandbits(40)}"
        if self._tame and rng.random() > WILD_SHARE:
            return self._tame_scalar(field)
        if field.type == FieldDescriptor.TYPE_STRING:
            likely = LIKELY.get(field.name)
            return rng.choice(likely) if likely and rng.random() < 0.7 else self.word()
        if POOLS[field.type] is UNSIGNED_LONGS and rng.random() < 0.6:
            return rng.choice(self.ids)
        return rng.choice(POOLS[field.type])  # KeyError: the contract has a new type of field

    def _tame_scalar(self, field: Any) -> Any:
        if field.type == FieldDescriptor.TYPE_STRING:
            return self.rng.choice(LIKELY.get(field.name, TAME_WORDS))
        if POOLS[field.type] is UNSIGNED_LONGS:
            return self.rng.choice(self.ids)
        if field.full_name in TAME_FIELDS:
            return TAME_FIELDS[field.full_name]
        return self.rng.choice(TAME_POOLS.get(field.type, TAME_NUMBERS))


def pack(frames: list[bytes]) -> bytes:
    """Several frames as one input."""
    return b"".join(struct.pack("<I", len(f)) + f for f in frames)


def unpack(data: bytes) -> list[bytes]:
    """The frames of an input; any bytes have some."""
    frames: list[bytes] = []
    while len(data) > 4 and len(frames) < 64:
        size = min(struct.unpack_from("<I", data)[0], len(data) - 4)
        frames.append(data[4 : 4 + size])
        data = data[4 + size :]
    return frames or [data]
