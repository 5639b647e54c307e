"""The possible contents of a disk after a loss of power, from the log of calls that tests/disk/layer.c writes.

The model is POSIX taken strictly. A file holds for certain what was written before a sync of it that returned began;
a name is for certain what it was when its directory was last synced, and syncing a file says nothing about its name. Of
what came later any part may have reached the disk, in any order: writes in pieces of 512 bytes, each new or old, a
file's end anywhere that some piece made it, bytes between that nobody wrote, and a flipped bit in what was being
written. A rename is one step. After a sync that failed, what it should have written may or may not be there, and no
later sync makes it so: the kernel takes it for written.

Kinder than the strictest reading in one thing, which SQLite relies on too (its SQLITE_IOCAP_POWERSAFE_OVERWRITE): a
write that is torn does no harm to the bytes beside it in its sector.
"""

import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SECTOR_BYTES = 512
_HEAD = struct.Struct("<IIQQQII")
_MAGIC = 0x4B534944
CREATE, WRITE, TRUNCATE, SYNC_BEGIN, SYNC_END, SYNC_FAILED, UNLINK, RENAME, LINK = range(1, 10)
# Which part of the unsynced data is on the disk, and the weight of this case.
_FATES = {"none": 2, "all": 2, "prefix": 3, "subset": 3, "sectors": 4}
_FLIP, _STALE = 0.3, 0.3  # a flipped bit in what was being written; old bytes instead of zeros where nobody wrote


@dataclass(slots=True)
class Record:
    """One call, or the beginning or end of a sync."""

    op: int
    inode: int
    a: int
    b: int
    data: bytes  # of a write; else a name
    new_name: bytes  # of a rename


def read_log(path: Path) -> Iterator[Record]:
    """The records, in order; the last may have been cut off by the kill."""
    data = memoryview(path.read_bytes())
    at = 0
    while len(data) - at >= _HEAD.size:
        magic, op, inode, a, b, length1, length2 = _HEAD.unpack_from(data, at)
        assert magic == _MAGIC, f"the log is broken at {at}"
        begin = at + _HEAD.size
        at = begin + length1 + length2
        if at > len(data):
            return
        yield Record(op, inode, a, b, bytes(data[begin : begin + length1]), bytes(data[begin + length1 : at]))


@dataclass(slots=True)
class _File:
    """A file: the synced contents, and later calls, each with its place in the log."""

    certain: bytearray = field(default_factory=bytearray)
    since: list[tuple[int, Record]] = field(default_factory=list)


@dataclass(slots=True)
class _Directory:
    certain: dict[str, int] = field(default_factory=dict)
    since: list[tuple[int, dict[str, int | None]]] = field(default_factory=list)


@dataclass(slots=True)
class Image:
    """The contents of a disk: directories and files by their path below the root."""

    directories: list[str]
    files: dict[str, bytes]

    def write(self, root: Path) -> None:
        """Makes `root` hold this and nothing else."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for path in self.directories:
            (root / path).mkdir()
        for path, data in self.files.items():
            (root / path).write_bytes(data)


class Disk:
    """The disk below `root`, beginning with what lies there now, and going on with each `apply`."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        self._rng = rng
        self._things: list[_File | _Directory] = []
        self._ids: dict[int, int] = {}  # the inode as the log has it, which may be used again -> its place in `_things`
        self._began: dict[int, int] = {}  # a sync's number -> its place in the log
        self._place = 0
        self._root = self._load(root)

    def _load(self, path: Path) -> int:
        inode = path.stat().st_ino
        if not path.is_dir():
            return self._add(inode, _File(bytearray(path.read_bytes())))
        children = [child for child in sorted(path.iterdir()) if not child.name.endswith("-shm")]
        return self._add(inode, _Directory({child.name: self._load(child) for child in children}))

    def _add(self, inode: int, thing: "_File | _Directory") -> int:
        self._ids[inode] = len(self._things)
        self._things.append(thing)
        return self._ids[inode]

    def apply(self, record: Record) -> None:
        self._place += 1
        if record.op == CREATE:
            thing = self._add(record.inode, _Directory() if record.b else _File())
            self._rename(record.a, {record.data.decode(): thing})
        elif record.op in (WRITE, TRUNCATE):
            file = self._things[self._ids[record.inode]]
            assert isinstance(file, _File)
            file.since.append((self._place, record))
        elif record.op == SYNC_BEGIN:
            self._began[record.a] = self._place
        elif record.op == SYNC_END:
            self._make_certain(record.inode, self._began.pop(record.a))
        elif record.op == SYNC_FAILED:
            self._forget_dirty(record.inode)
        elif record.op == UNLINK:
            self._rename(record.a, {record.data.decode(): None})
        elif record.op == RENAME:
            assert record.a == record.b, "a rename from one directory to another isn't modelled"
            self._rename(record.a, {record.data.decode(): None, record.new_name.decode(): self._ids[record.inode]})
        else:
            assert record.op == LINK, record
            self._rename(record.a, {record.data.decode(): self._ids[record.inode]})

    def _rename(self, inode: int, names: dict[str, int | None]) -> None:
        directory = self._things[self._ids[inode]]
        assert isinstance(directory, _Directory)
        directory.since.append((self._place, names))

    def _make_certain(self, inode: int, place: int) -> None:
        thing = self._things[self._ids[inode]]
        if isinstance(thing, _File):
            for at, record in thing.since:
                if at < place:
                    _do(thing.certain, record)
            thing.since = [step for step in thing.since if step[0] >= place]
        else:
            for at, names in thing.since:
                if at < place:
                    _name(thing.certain, names)
            thing.since = [move for move in thing.since if move[0] >= place]

    def _forget_dirty(self, inode: int) -> None:
        thing = self._things[self._ids[inode]]
        if isinstance(thing, _File):
            thing.certain, thing.since = self._torn(thing), []
        else:
            thing.certain, thing.since = self._some_names(thing), []

    # --- possible contents -------------------------------------------------------------------------------------------

    def cached_view(self) -> Image:
        """The files that processes read while there is power."""
        return self._image(_all, _all_names)

    def lost_power(self) -> Image:
        """A random possible disk image if the power is lost now. Does not change this object."""
        return self._image(self._torn, self._some_names)

    def _image(self, contents: Callable[[_File], bytearray], names: Callable[[_Directory], dict[str, int]]) -> Image:
        image = Image([], {})

        def walk(directory: _File | _Directory, prefix: str) -> None:
            assert isinstance(directory, _Directory)
            for name, child in sorted(names(directory).items()):
                thing = self._things[child]
                if isinstance(thing, _Directory):
                    image.directories.append(prefix + name)
                    walk(thing, f"{prefix}{name}/")
                else:
                    image.files[prefix + name] = bytes(contents(thing))

        walk(self._things[self._root], "")
        return image

    def _fate(self) -> str:
        (fate,) = self._rng.choices(list(_FATES), list(_FATES.values()))
        return fate

    def _some_names(self, directory: _Directory) -> dict[str, int]:
        certain, rng = dict(directory.certain), self._rng
        steps = [names for _, names in directory.since]
        fate = self._fate()
        if fate == "none":
            steps = []
        elif fate == "prefix":
            steps = steps[: rng.randint(0, len(steps))]
        elif fate in ("subset", "sectors"):
            steps = [step for step in steps if rng.random() < 0.5]
        for step in steps:
            _name(certain, step)
        return certain

    def _torn(self, file: _File) -> bytearray:
        data, rng = bytearray(file.certain), self._rng
        records = [record for _, record in file.since]
        if not records:
            return data
        fate = self._fate()
        if fate == "none":
            return data
        if fate == "prefix":
            records = records[: rng.randint(0, len(records))]
        elif fate == "subset":
            records = [record for record in records if rng.random() < 0.5]
        elif fate == "sectors":
            share = rng.random()
            records = [piece for r in records for piece in _sectors(r) if rng.random() < share]
        stale = rng.randbytes(SECTOR_BYTES) if rng.random() < _STALE else b""
        written = []
        for record in records:
            if stale and record.op == WRITE and record.a > len(data):
                gap = record.a - len(data)
                data += (stale * (gap // SECTOR_BYTES + 1))[:gap]
            _do(data, record)
            if record.op == WRITE:
                written.append(record)
        if written and rng.random() < _FLIP:
            record = rng.choice(written)
            at = record.a + rng.randrange(len(record.data))
            if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
        return data


def _do(data: bytearray, record: Record) -> None:
    if record.op == WRITE:
        if record.a > len(data):
            data += bytes(record.a - len(data))
        data[record.a : record.a + len(record.data)] = record.data
    else:
        del data[record.a :]
        data += bytes(record.a - len(data))


def _sectors(record: Record) -> Iterator[Record]:
    """A write in pieces that a disk writes whole."""
    if record.op != WRITE:
        yield record
        return
    at, end = record.a, record.a + len(record.data)
    while at < end:
        cut = min(end, (at // SECTOR_BYTES + 1) * SECTOR_BYTES)
        yield Record(WRITE, record.inode, at, 0, record.data[at - record.a : cut - record.a], b"")
        at = cut


def _name(certain: dict[str, int], names: dict[str, int | None]) -> None:
    for name, inode in names.items():
        if inode is None:
            certain.pop(name, None)
        else:
            certain[name] = inode


def _all(file: _File) -> bytearray:
    data = bytearray(file.certain)
    for _, record in file.since:
        _do(data, record)
    return data


def _all_names(directory: _Directory) -> dict[str, int]:
    certain = dict(directory.certain)
    for _, names in directory.since:
        _name(certain, names)
    return certain
