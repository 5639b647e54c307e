"""The parts of protobuf's encoding needed to put a message together from serialized fields."""


def varint(value: int) -> bytes:
    """A length in protobuf's encoding."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(number: int) -> bytes:
    """The tag of a length-delimited field: bytes, a string or a message."""
    return varint(number << 3 | 2)
