"""A simulated network between processes: it delays, loses, cuts in one direction, and resets.

Each place (the master's, a worker's, the clients') is a network namespace with one TUN device. This process reads every
IP packet that leaves a place and writes it to the place of its destination: later, or not, or both ends get a TCP reset
instead. Namespaces and devices are held open by this process and end with it. Neither netem nor iptables is needed,
which many kernels lack.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import selectors
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_NETWORK = "10.231.87"
_MTU = 1400
_PACKET_BYTES = 65536
_TCP, _RST, _ACK = 6, 0x04, 0x10
# The most packets on their way; further ones are lost.
_WAITING_MAX = 20_000
# The place of this process: it stays in its namespace, and gets a device.
HERE = "here"


class NotAllowedError(Exception):
    """This machine does not permit namespaces or devices; the message says which and what would help."""


@dataclass(slots=True, kw_only=True)
class Way:
    """What happens to packets from one place to another."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0  # a share of the packets, 1.0 for a cut


class Network:
    """See the module. The first place is `HERE`."""

    def __init__(self, places: list[str], seed: int) -> None:
        self.seen: Counter[str] = Counter()  # packets: carried, delayed, lost, reset
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._ways: dict[tuple[str, str], Way] = {}
        self._resetting: dict[frozenset[str], float] = {}  # pairs, and until when
        self._namespaces: dict[str, int] = {}
        self._devices: dict[str, int] = {}
        self._places = [HERE, *places]
        self._stop_reader, self._stop_writer = os.pipe()
        # One network at a time on a host: all have the same addresses.
        self._only = (Path(tempfile.gettempdir()) / "mgchaos.lock").open("a")
        fcntl.flock(self._only, fcntl.LOCK_EX)
        self._thread = threading.Thread(target=self._carry, name="wire", daemon=True)
        try:
            for place in self._places:
                self._make(place)
        except BaseException:
            self._release()
            raise
        self._by_address = {socket.inet_aton(self.address(p)): p for p in self._places}
        self._thread.start()

    def address(self, place: str) -> str:
        return f"{_NETWORK}.{self._places.index(place) + 1}"

    def prefix(self, place: str) -> list[str]:
        """The command that starts another one in a place."""
        return ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._namespaces[place]}", "--"]

    def shape(self, source: str, target: str, way: Way | None) -> None:
        """What happens from now on to packets one way; None: nothing."""
        with self._lock:
            if way is None:
                self._ways.pop((source, target), None)
            else:
                self._ways[source, target] = way

    def shape_both(self, one: str, other: str, way: Way | None) -> None:
        self.shape(one, other, way)
        self.shape(other, one, way)

    def reset(self, one: str, other: str, duration_s: float = 0.3) -> None:
        """For `duration_s`, each TCP packet between two places resets its connection at both."""
        with self._lock:
            self._resetting[frozenset((one, other))] = time.monotonic() + duration_s

    def heal(self) -> None:
        with self._lock:
            self._ways.clear()
            self._resetting.clear()

    def close(self) -> None:
        """Removes the network. A second call does nothing."""
        if self._thread.is_alive():
            os.write(self._stop_writer, b"x")
            self._thread.join()
            self._release()

    # --- setup ---------------------------------------------------------------------------------------------------

    def _make(self, place: str) -> None:
        """A namespace, except for HERE, and its device; in a thread, because a namespace belongs to a thread."""
        errors: list[Exception] = []

        def build() -> None:
            try:
                if place != HERE:
                    _new_namespace()
                    self._namespaces[place] = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                self._devices[place] = self._open_device(place)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def _open_device(self, place: str) -> int:
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NotAllowedError(f"no TUN devices: {error}; load the module tun, and run as root") from error
        try:
            asked = struct.pack("16sH22x", b"mgchaos%d", _IFF_TUN | _IFF_NO_PI)
            name = fcntl.ioctl(device, _TUNSETIFF, asked)[:16].rstrip(b"\0").decode()
            for arguments in (
                ["address", "add", f"{self.address(place)}/24", "dev", name],
                ["link", "set", "lo", "up"],
                ["link", "set", name, "up", "mtu", str(_MTU)],
            ):
                subprocess.run(["ip", *arguments], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            os.close(device)
            reason = getattr(error, "stderr", None) or error
            raise NotAllowedError(f"can't set up a device: {reason!r}; run as root, with iproute2 installed") from error
        return device

    def _release(self) -> None:
        for descriptor in (*self._devices.values(), *self._namespaces.values(), self._stop_reader, self._stop_writer):
            os.close(descriptor)
        self._only.close()

    # --- packets ----------------------------------------------------------------------------------------------------

    def _carry(self) -> None:
        waiting: list[tuple[float, int, int, bytes]] = []  # due, in order, by device
        numbers = count()
        with selectors.DefaultSelector() as selector:
            for place, device in self._devices.items():
                selector.register(device, selectors.EVENT_READ, place)
            selector.register(self._stop_reader, selectors.EVENT_READ)
            while True:
                timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
                for key, _ in selector.select(timeout_s):
                    if key.fd == self._stop_reader:
                        return
                    for packet in _packets(key.fd):
                        for due_s, device, what in self._sort(key.data, packet):
                            if len(waiting) < _WAITING_MAX:
                                heapq.heappush(waiting, (due_s, next(numbers), device, what))
                now = time.monotonic()
                while waiting and waiting[0][0] <= now:
                    _, _, device, what = heapq.heappop(waiting)
                    # If the device is full or down, the packet is lost.
                    with contextlib.suppress(OSError):
                        os.write(device, what)

    def _sort(self, source: str, packet: bytes) -> Iterator[tuple[float, int, bytes]]:
        """The packets that follow from this one: when, for which device, what."""
        target = self._by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
        if target is None:
            return
        now = time.monotonic()
        with self._lock:
            way = self._ways.get((source, target))
            resetting = self._resetting.get(frozenset((source, target)), 0.0) > now
        if resetting and packet[9] == _TCP:
            self.seen["reset"] += 1
            to_target, to_source = _resets(packet)
            yield now, self._devices[target], to_target
            if to_source is not None:
                yield now, self._devices[source], to_source
        elif way is None:
            self.seen["carried"] += 1
            yield now, self._devices[target], packet
        elif way.loss and self._random.random() < way.loss:
            self.seen["lost"] += 1
        else:
            self.seen["delayed"] += 1
            yield now + way.delay_s + self._random.random() * way.jitter_s, self._devices[target], packet


def _new_namespace() -> None:
    """For the calling thread."""
    if _LIBC.unshare(_CLONE_NEWNET):
        raise NotAllowedError(f"no network namespaces: {os.strerror(ctypes.get_errno())}; run as root")


def _packets(device: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):  # and then the others' turn
            yield os.read(device, _PACKET_BYTES)


def _resets(packet: bytes) -> tuple[bytes, bytes | None]:
    """The resets that end a packet's connection: for its target, and for its source if it will believe it."""
    head = (packet[0] & 15) * 4
    source, target = packet[12:16], packet[16:20]
    source_port, target_port, sequence, acknowledged, _, flags = struct.unpack_from("!HHIIBB", packet, head)
    to_target = _segment(source, target, source_port, target_port, sequence)
    if not flags & _ACK:
        return to_target, None
    return to_target, _segment(target, source, target_port, source_port, acknowledged)


def _segment(source: bytes, target: bytes, source_port: int, target_port: int, sequence: int) -> bytes:
    """An IP packet with a TCP reset in it."""
    tcp = struct.pack("!HHIIBBHHH", source_port, target_port, sequence, 0, 5 << 4, _RST, 0, 0, 0)
    tcp = tcp[:16] + _checksum(source + target + struct.pack("!BBH", 0, _TCP, len(tcp)) + tcp) + tcp[18:]
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), 0, 0, 64, _TCP, 0, source, target)
    return ip[:10] + _checksum(ip) + ip[12:] + tcp


def _checksum(data: bytes) -> bytes:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~total & 0xFFFF)
