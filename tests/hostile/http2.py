"""A peer that sends HTTP/2 frames made by hand, which no gRPC library sends, in any number.

It respects flow control, because the server disconnects peers that do not. It reads only windows, ends of streams and
pings; tests that need statuses use a gRPC client.
"""

import contextlib
import functools
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Self

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM = ACK = 1
END_HEADERS = 4
MIB = 1 << 20
SUBMIT, RUN = "/multigpu.v1.TaskService/Submit", "/multigpu.v1.TaskService/Run"
HEALTH, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
_OUT_BYTES_MAX = 1 << 18


def rss_bytes(pid: int) -> int:
    """The process's resident memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def _text(value: bytes) -> bytes:
    """A string of HPACK, without Huffman's code."""
    if len(value) < 127:
        return bytes([len(value)]) + value
    rest, out = len(value) - 127, bytearray([127])
    while rest >= 128:
        out.append(rest % 128 + 128)
        rest //= 128
    return bytes([*out, rest]) + value


def header_block(path: bytes, more: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """The headers of a call of gRPC, each written out."""
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")]
    fields += [(b"te", b"trailers"), (b"content-type", b"application/grpc"), *more]
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def referring_block(path: bytes, times: int) -> bytes:
    """The headers of a call that references one entry of the dynamic table (see `Peer.remember`) many times."""
    return header_block(path) + b"\xbe" * times


def announced(size: int) -> bytes:
    """The prefix of a message of that size."""
    return b"\0" + size.to_bytes(4, "big")


@functools.cache
def bomb(size: int) -> bytes:
    """A message of zeros, compressed by gzip."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = b"".join(packer.compress(bytes(MIB)) for _ in range(size // MIB)) + packer.flush()
    return b"\1" + len(packed).to_bytes(4, "big") + packed


@dataclass(slots=True)
class _Stream:
    """Data left to send, and the window beyond the initial one."""

    begin: bytearray
    zeros: int
    window: int = 0

    def take(self, room: int) -> bytes:
        """At most `room` bytes of it."""
        body = bytes(self.begin[: max(0, room)]) or bytes(min(max(0, room), self.zeros))
        if self.begin:
            del self.begin[: len(body)]
        else:
            self.zeros -= len(body)
        self.window -= len(body)
        return body


class Peer:
    """One connection. `window`: bytes of each response that it reads. `acknowledges`: whether it acknowledges the
    server's settings, which hold from then on.
    """

    def __init__(self, address: str, window: int = 65_535, *, acknowledges: bool = True) -> None:
        self._acknowledges = acknowledges
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._socket.setblocking(False)
        self._out = bytearray(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._out += frame(SETTINGS, 0, 0, struct.pack(">HI", 4, window))
        self._in = bytearray()
        self._window = self._initial = 65_535
        self._frame_max = 16_384
        self.streams_max = 0  # from the server's settings
        self._streams: dict[int, _Stream] = {}
        self.opened = 0
        self.ended: set[int] = set()
        self.sent_bytes = 0
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._socket.close()

    def send(self, raw: bytes) -> None:
        self._out += raw

    def call(
        self, path: bytes | str, begin: bytes = b"", zeros: int = 0, more: Iterable[tuple[bytes, bytes]] = ()
    ) -> int:
        """Opens a stream, sends `begin`, then zeros as the window allows, and never ends it."""
        stream = self.open(header_block(path.encode() if isinstance(path, str) else path, more))
        self._streams[stream] = _Stream(bytearray(begin), zeros)
        return stream

    def open(self, block: bytes, flags: int = 0) -> int:
        """Opens a stream by a block of headers, in as many frames as it takes."""
        stream = 2 * self.opened + 1
        self.opened += 1
        parts = [block[at : at + 16_384] for at in range(0, len(block), 16_384)]
        for number, part in enumerate(parts):
            end = END_HEADERS if number == len(parts) - 1 else 0
            self._out += frame(CONTINUATION if number else HEADERS, end | (0 if number else flags), stream, part)
        return stream

    def remember(self, path: bytes, size: int) -> None:
        """A call whose last header stays in the dynamic table, as its newest entry."""
        self.open(header_block(path) + b"\x40" + _text(b"x-a") + _text(b"b" * size), END_STREAM)

    def step(self) -> None:
        """Sends and receives as much as possible without waiting."""
        for number, sending in self._streams.items():
            while len(self._out) < _OUT_BYTES_MAX:
                body = sending.take(min(self._frame_max, self._window, self._initial + sending.window))
                if not body:
                    break
                self._window -= len(body)
                self.sent_bytes += len(body)
                self._out += frame(DATA, 0, number, body)
        try:
            with contextlib.suppress(BlockingIOError):
                del self._out[: self._socket.send(self._out)]
            with contextlib.suppress(BlockingIOError):
                got = self._socket.recv(_OUT_BYTES_MAX)
                self.closed = self.closed or not got
                self._in += got
        except OSError:
            self.closed = True
        while len(self._in) >= 9 and len(self._in) >= 9 + (size := int.from_bytes(self._in[:3], "big")):
            kind, flags, stream = self._in[3], self._in[4], int.from_bytes(self._in[5:9], "big")
            body = bytes(self._in[9 : 9 + size])
            del self._in[: 9 + size]
            self._take(kind, flags, stream, body)

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(body), 6):
                key, value = int.from_bytes(body[at : at + 2], "big"), int.from_bytes(body[at + 2 : at + 6], "big")
                self._initial = value if key == 4 else self._initial
                self.streams_max = value if key == 3 else self.streams_max
                self._frame_max = min(value, _OUT_BYTES_MAX) if key == 5 else self._frame_max
            if self._acknowledges:
                self._out += frame(SETTINGS, ACK, 0)
        elif kind == PING and not flags & ACK:
            self._out += frame(PING, ACK, 0, body)
        elif kind == WINDOW_UPDATE:
            value = int.from_bytes(body, "big")
            if stream == 0:
                self._window += value
            elif stream in self._streams:
                self._streams[stream].window += value
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.ended.add(stream)
            self._streams.pop(stream, None)


def drive(peers: Sequence[Peer], seconds: float, grown: Callable[[], int]) -> int:
    """Runs the peers until all their streams have ended or the time is over. Returns the maximum of `grown`."""
    peak, end_s = 0, time.monotonic() + seconds
    while time.monotonic() < end_s:
        for peer in peers:
            if not peer.closed:
                peer.step()
        peak = max(peak, grown())
        if all(peer.closed or len(peer.ended) == peer.opened for peer in peers):
            break
    return peak


def odd_call(random: Random, peer: Peer, paths: Sequence[str]) -> None:
    """A random call without a token: path, metadata, encoding, message and what follows."""
    path: bytes = random.choice([*(p.encode() for p in paths), random.randbytes(random.randrange(40)), b"/a\nb/\xff"])
    more: list[tuple[bytes, bytes]] = []
    for name in (b"authorization", b"user-agent", b"grpc-timeout", b"grpc-encoding", b"x-bin", b"x-text", b"host"):
        if random.random() < 0.2:
            more.append((name, random.choice([random.randbytes(random.randrange(300)), b"gzip", b"bearer x", b"1S"])))
    begin = random.choice(
        [b"", announced(63 * MIB), announced(2**32 - 1), announced(0), bomb(8 * MIB), random.randbytes(30)]
    )
    if begin[:1] == b"\1":
        more.append((b"grpc-encoding", b"gzip"))
    stream = peer.call(path, begin, random.choice([0, 1000, 63 * MIB]), more)
    if random.random() < 0.1:
        peer.send(frame(RST_STREAM, 0, stream, bytes(3) + b"\x08"))
        peer.ended.add(stream)
    if random.random() < 0.05:
        peer.send(frame(GOAWAY, 0, 0, bytes(7) + b"\2" + b'\n{"event": "forged"}\x1b[31m' + random.randbytes(20)))


def odd_round(random: Random, address: str, paths: Sequence[str], grown: Callable[[], int]) -> int:
    """Several peers with malformed calls, some of which read nothing. Returns the maximum of `grown`."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(address, window)) for window in (65_535, 65_535, 65_535, 0)]
        for peer in peers:
            for _ in range(random.randrange(1, 40)):
                odd_call(random, peer, paths)
        return drive(peers, 1.0, grown)
