"""The embedding cache: a text that was embedded before is not embedded again.

A vector is found by what it was computed from: the content of every file of the model's folder, the identity of the
back end (engine, precision, kind of device, versions of what computes), and the text; never by the model's name. So
another model under an old name, a new version in an old folder or an upgrade can't be answered with vectors of before,
and one model in two folders shares its vectors. What is found is, bit for bit, what was computed once.

In memory the vector that was asked for longest ago goes first. Behind the memory there may be a file
(cache_file.py), which other workers of the host write too.

Texts that are alike and under way are computed once. Within a batch the first is computed for all. Of an engine's
batches one runs at a time (engine/runtime.py) while the next are prepared: these are looked up before it is done, so
what it computes is handed to each of them that wants it, though the memory may have no room for it. Nobody waits for
that: a batch that begins computes what it was not handed, whatever became of the batches before it. Engine processes
don't wait for one another.
"""

import hashlib
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from multigpu_worker.engines.base import EmbeddingCacheCounts, EmbeddingCacheSettings
from multigpu_worker.engines.embed.cache_file import CacheFile, Row
from multigpu_worker.models.folders import ModelFolderError, read_layout

KEY_BYTES = 32
# What an entry takes in memory besides its vector: the key, the tuple, the time, their places in the table.
ENTRY_BYTES = 320


@dataclass(frozen=True, slots=True)
class ModelContent:
    """What lies in a model's folder, by its hash."""

    folder: Path
    digest: bytes
    # Of each file: path, inode, size, and when it was changed.
    stamp: tuple[tuple[str, int, int, int, int], ...]

    @staticmethod
    def read(folder: Path) -> "ModelContent":
        """Read all of it: about a second a gigabyte. Raises ModelFolderError."""
        stamp = _stamp(folder)
        content = hashlib.sha256()
        try:
            for name, *_ in stamp:
                with Path(name).open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").digest()
                content.update(os.path.relpath(name, folder).encode("utf-8", "surrogateescape") + b"\0" + digest)
        except OSError as error:
            raise ModelFolderError(f"{folder} can't be read ({error}): copy the model folder again") from error
        return ModelContent(folder, content.digest(), stamp)

    def check(self) -> None:
        """Raises ModelFolderError if anything has changed since: what was loaded may be half of each."""
        if _stamp(self.folder) != self.stamp:
            raise ModelFolderError(
                f"{self.folder} was changed while it was being loaded: try again when it is complete"
            )

    def identity(self, backend: str) -> bytes:
        """What is common to all keys of this model's vectors by a back end of that identity (backend.py)."""
        return hashlib.sha256(self.digest + backend.encode()).digest()


def _stamp(folder: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    layout = read_layout(folder)
    roots = {folder, layout.transformer, *(path for _, path in layout.steps or ())}
    found = {}
    try:
        for path in {path for root in roots for path in _files(root, set())}:
            status = path.stat()
            changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
            found[str(path)] = status.st_ino, status.st_size, status.st_mtime_ns, changed_ns
    except OSError as error:
        raise ModelFolderError(f"{folder} can't be read ({error}): copy the model folder again") from error
    return tuple((path, *found[path]) for path in sorted(found))


def _files(folder: Path, seen: set[str]) -> Iterator[Path]:
    """All files below, through links too, but for hidden ones, which nothing reads."""
    if not folder.is_dir() or (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files(path, seen)
        else:
            yield path


class EmbedCache:
    """See the module. Safe to use from several threads."""

    def __init__(self, settings: EmbeddingCacheSettings) -> None:
        """Begin with an empty memory, and with what the file holds."""
        assert settings.entries > 0
        self._settings = settings
        self._lock = threading.Lock()
        # Key to when it was computed and the vector, the one asked for longest ago first.
        self._entries: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0
        # Batches that have not begun: what comes is handed to them. One that never begins goes with its last reference.
        self._waiting: weakref.WeakSet[Recall] = weakref.WeakSet()
        self._hits = self._joined = self._misses = 0
        self.file = self._open_file(settings)

    @staticmethod
    def _open_file(settings: EmbeddingCacheSettings) -> CacheFile | None:
        if not settings.file:
            return None
        path = Path(settings.file)
        return CacheFile(path, entries=settings.entries, bytes_max=settings.bytes_max, ttl_s=settings.ttl_s)

    def recall(self, identity: bytes, texts: Sequence[str], owners: npt.NDArray[np.int64], dimension: int) -> "Recall":
        """Look a batch's texts up. `owners`: of each text the item that it belongs to."""
        return Recall(self, identity, texts, owners, dimension)

    def find(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The vectors of those keys that are known, as bytes of little-endian float32."""
        now_s = time.time()
        found: dict[bytes, bytes] = {}
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is None:
                    continue
                if self._is_fresh(entry[0], now_s):
                    self._entries.move_to_end(key)
                    found[key] = entry[1]
                else:
                    self._drop(key)
        if self.file is None or len(found) == len(keys):
            return found
        rows = [
            row for row in self.file.find([key for key in keys if key not in found]) if self._is_fresh(row[1], now_s)
        ]
        self._remember(rows)
        found.update((row.key, row.vector) for row in rows)
        return found

    def put(self, keys: Sequence[bytes], vectors: npt.NDArray[np.float32]) -> None:
        """Remember vectors: float32 [keys, dimension]. What is no number is not believed."""
        now_s = time.time()
        sound: list[bool] = np.atleast_1d(np.isfinite(vectors).all(axis=1)).tolist()
        rows = [
            Row(key, now_s, vectors[i].astype("<f4", copy=False).tobytes()) for i, key in enumerate(keys) if sound[i]
        ]
        self._remember(rows)
        known = {row.key: row.vector for row in rows}
        with self._lock:
            for recall in self._waiting:
                recall.offer(known)
        if self.file is not None and rows:
            self.file.put(rows)

    def wait(self, recall: "Recall") -> None:
        """From now on this batch is handed what comes, until it begins."""
        with self._lock:
            self._waiting.add(recall)

    def begin(self, recall: "Recall") -> None:
        """It is handed nothing more."""
        with self._lock:
            self._waiting.discard(recall)

    def count(self, *, hits: int = 0, joined: int = 0, misses: int = 0) -> None:
        with self._lock:
            self._hits += hits
            self._joined += joined
            self._misses += misses

    def counts(self) -> EmbeddingCacheCounts:
        with self._lock:
            return EmbeddingCacheCounts(
                hits=self._hits,
                joined=self._joined,
                misses=self._misses,
                entries=len(self._entries),
                size_bytes=self._bytes,
            )

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def _is_fresh(self, stored_s: float, now_s: float) -> bool:
        # Either way: the clock may have been set back.
        return not self._settings.ttl_s or abs(now_s - stored_s) < self._settings.ttl_s

    def _remember(self, rows: Sequence[Row]) -> None:
        with self._lock:
            for row in rows:
                if row.key in self._entries:
                    self._drop(row.key)
                self._entries[row.key] = row.stored_s, row.vector
                self._bytes += ENTRY_BYTES + len(row.vector)
            while len(self._entries) > self._settings.entries or self._bytes > self._settings.bytes_max:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        self._bytes -= ENTRY_BYTES + len(self._entries.pop(key)[1])


@dataclass(slots=True)
class Served:
    """Vectors that need not be computed."""

    places: list[int] = field(default_factory=list)
    vectors: list[bytes] = field(default_factory=list)


class Recall:
    """What the cache knew of a batch's texts, and what is left to compute: of texts that are alike, the first."""

    def __init__(
        self,
        cache: EmbedCache,
        identity: bytes,
        texts: Sequence[str],
        owners: npt.NDArray[np.int64],
        dimension: int,
    ) -> None:
        self.owners = owners
        self._cache = cache
        self._vector_bytes = 4 * dimension
        self._keys = _keys(identity, texts)
        # Key to where its text stands, the first place first.
        self._places: dict[bytes, list[int]] = {}
        for place, key in enumerate(self._keys):
            self._places.setdefault(key, []).append(place)
        # What was handed over before the batch began.
        self._offered: dict[bytes, bytes] = {}
        # Before the look: what comes in between must not be missed.
        cache.wait(self)
        known = self._sized(cache.find(list(self._places)))
        self._served = Served()
        self._missing = {key: at for key, at in self._places.items() if key not in known}
        for key, vector in known.items():
            self._serve(self._places[key], vector)
        self.missing = [at[0] for at in self._missing.values()]
        # First place to the others.
        self._twins = {at[0]: at[1:] for at in self._missing.values() if len(at) > 1}
        # First places that need not be computed any more.
        self.late: set[int] = set()

    def offer(self, known: dict[bytes, bytes]) -> None:
        """What another batch has computed. Under the cache's lock."""
        self._offered.update((key, known[key]) for key in self._places.keys() & known.keys())

    def begin(self) -> Served:
        """What is known now that the batch begins. Counts hits, and what is joined so far. To be called once."""
        self._cache.begin(self)
        hits = len(self._served.places)
        for key, vector in self._sized(self._offered).items():
            if key in self._missing:
                self._serve(self._missing[key], vector)
                self.late.add(self._missing[key][0])
        self._cache.count(hits=hits, joined=len(self._served.places) - hits)
        return self._served

    def computed(self, places: Sequence[int], vectors: npt.NDArray[np.float32], *, keep: bool) -> None:
        """Count what was computed for the texts in these places, and for their twins, and remember it if `keep`."""
        joined = sum(len(self.twins(place)) for place in places) if self._twins else 0
        self._cache.count(joined=joined, misses=len(places))
        if keep:
            self._cache.put([self._keys[place] for place in places], vectors)

    def twins(self, place: int) -> list[int]:
        """The other places of the text that is computed for this one."""
        return self._twins.get(place, [])

    def _serve(self, places: list[int], vector: bytes) -> None:
        self._served.places += places
        self._served.vectors += [vector] * len(places)

    def _sized(self, found: dict[bytes, bytes]) -> dict[bytes, bytes]:
        return {key: vector for key, vector in found.items() if len(vector) == self._vector_bytes}


def _keys(identity: bytes, texts: Sequence[str]) -> list[bytes]:
    base = hashlib.blake2b(identity, digest_size=KEY_BYTES)
    keys = []
    for text in texts:
        digest = base.copy()
        digest.update(text.encode())
        keys.append(digest.digest())
    return keys
