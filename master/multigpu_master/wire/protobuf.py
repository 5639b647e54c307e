"""The two pieces of protobuf's encoding that we write ourselves, to put messages together from parts that are
serialized already.
"""


def varint(value: int) -> bytes:
    """A length, as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(number: int) -> bytes:
    """What comes before the length of a field of bytes, or of a message."""
    return varint(number << 3 | 2)
