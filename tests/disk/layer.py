"""LD_PRELOAD fault injector: builds tests/disk/layer.c, and schedules faults in the processes that load it."""

import functools
import mmap
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Self

SOURCE = Path(__file__).with_name("layer.c")
_SLOTS = ("cut_in", "eio_sync_in", "eio_write_in", "room_bytes", "sync_delay_us", "calls", "syncs", "faults", "cuts")
_MATCH_BYTES = 64
_SIZE = 8 * len(_SLOTS) + _MATCH_BYTES


def missing_requirement() -> str:
    """What this machine lacks for the fault injector; "" if nothing."""
    return "" if shutil.which("gcc") else "no gcc: the layer is built from C (Debian: apt install gcc libc6-dev)"


@functools.cache
def build(source: Path = SOURCE) -> Path:
    """Builds the fault injector, or another library to preload, once per process."""
    library = Path(tempfile.mkdtemp(prefix=f"{source.stem}-")) / f"{source.stem}.so"
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(["gcc", *flags, "-o", library, source, "-ldl", "-pthread"], check=True)
    return library


class FaultInjector:
    """Faults in the file system calls below `root`, and the log of these calls. Both outlive the processes."""

    def __init__(self, root: Path, log: Path) -> None:
        self.log = log
        log.touch()
        control = log.with_name(log.name + ".control")
        control.write_bytes(bytes(_SIZE))
        with control.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _SIZE)
        # The log must lie outside root.
        assert root.resolve() not in log.resolve().parents
        self.env = {
            "LD_PRELOAD": str(build()),
            "DISK_LAYER_ROOT": str(root.resolve()),
            "DISK_LAYER_LOG": str(log.resolve()),
            "DISK_LAYER_CONTROL": str(control.resolve()),
        }
        self.heal()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._shared.close()

    def read(self, slot: str) -> int:
        (value,) = struct.unpack_from("q", self._shared, 8 * _SLOTS.index(slot))
        return int(value)

    def schedule(self, *, match: str | None = None, **slots: int) -> None:
        """Sets faults (see `struct control` in layer.c), all on files whose path contains `match`."""
        if match is not None:
            encoded = match.encode()
            assert len(encoded) < _MATCH_BYTES
            self._shared[8 * len(_SLOTS) :] = encoded.ljust(_MATCH_BYTES, b"\0")
        for slot, value in slots.items():
            struct.pack_into("q", self._shared, 8 * _SLOTS.index(slot), value)

    def heal(self) -> None:
        """Removes all faults; the sync delay is kept."""
        self.schedule(match="", cut_in=0, eio_sync_in=0, eio_write_in=0, room_bytes=-1)
