"""The embedding cache: a text that was embedded before is not embedded again.

The key of a vector is what it was computed from: the content of the model's folder, the back end's identity (engine,
precision, kind of device, versions) and the text, never the model's name. So a changed model or an upgrade cannot be
answered with old vectors, and copies of a model share theirs.

Memory evicts the vector that was asked for longest ago. Behind it there may be a file (cache_file.py), shared with
other workers of the host.

Equal texts within a batch are computed once. A prepared batch is looked up again when it begins to run, and so finds
what the batches before it computed. Engine processes do not wait for one another.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from multigpu_worker.engines.base import EmbeddingCacheCounts, EmbeddingCacheSettings
from multigpu_worker.engines.embed.cache_file import CacheFile, Row
from multigpu_worker.engines.embed.text import Text

KEY_BYTES = 32
# Memory of an entry in addition to its vector: key, tuple, time, and their places in the table.
ENTRY_BYTES = 320


class EmbedCache:
    """Any thread may call it."""

    def __init__(self, settings: EmbeddingCacheSettings) -> None:
        assert settings.entries > 0
        self._settings = settings
        self._lock = threading.Lock()
        # By key, the time of computation and the vector; the least recently used first.
        self._entries: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0
        self._hits = self._joined = self._misses = 0
        self._file = CacheFile(settings) if settings.file else None

    def find(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The known vectors of these keys, as bytes of little-endian float32."""
        found = self.find_in_memory(keys)
        if self._file is None or len(found) == len(keys):
            return found
        now_s = time.time()
        rows = self._file.find([key for key in keys if key not in found])
        rows = [row for row in rows if self._is_fresh(row.stored_s, now_s)]
        self._add(rows)
        found.update((row.key, row.vector) for row in rows)
        return found

    def find_in_memory(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
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
        return found

    def put(self, keys: Sequence[bytes], vectors: npt.NDArray[np.float32]) -> None:
        """Store vectors, float32 [keys, dimension], except those with NaN or infinity."""
        now_s = time.time()
        finite: list[bool] = np.atleast_1d(np.isfinite(vectors).all(axis=1)).tolist()
        rows = [
            Row(key, now_s, vectors[i].astype("<f4", copy=False).tobytes()) for i, key in enumerate(keys) if finite[i]
        ]
        self._add(rows)
        if self._file is not None and rows:
            self._file.put(rows)

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
        if self._file is not None:
            self._file.close()

    def _is_fresh(self, stored_s: float, now_s: float) -> bool:
        # In either direction: the clock may have been set back.
        return not self._settings.ttl_s or abs(now_s - stored_s) < self._settings.ttl_s

    def _add(self, rows: Sequence[Row]) -> None:
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
class Known:
    """Vectors from the cache, and the places of their texts in the batch."""

    places: list[int] = field(default_factory=list)
    vectors: list[bytes] = field(default_factory=list)


class Lookup:
    """What the cache knows about a batch's texts. Of equal texts, the first is computed for all."""

    def __init__(
        self,
        cache: EmbedCache,
        identity: bytes,
        texts: Sequence[Text],
        owners: npt.NDArray[np.int64],
        dimension: int,
    ) -> None:
        """`identity`: the part of the key that all texts share. `owners`: for each text, the index of its item."""
        self.owners = owners
        self._cache = cache
        self._vector_bytes = 4 * dimension
        self._keys = _keys(identity, texts)
        # By key, the places of its text in the batch, in order.
        places: dict[bytes, list[int]] = {}
        for place, key in enumerate(self._keys):
            places.setdefault(key, []).append(place)
        self._known = Known()
        known = self._sized(cache.find(list(places)))
        for key, vector in known.items():
            self._take(places[key], vector)
        self._missing = {key: at for key, at in places.items() if key not in known}
        # Places of the texts to compute.
        self.missing = [at[0] for at in self._missing.values()]
        self._duplicates = {at[0]: at[1:] for at in self._missing.values() if len(at) > 1}
        # Those of `missing` that need not be computed any more.
        self.late: set[int] = set()

    def begin(self) -> Known:
        """What is known now that the batch begins to run. Called once; counts hits and joined texts."""
        hits = len(self._known.places)
        for key, vector in self._sized(self._cache.find_in_memory(list(self._missing))).items():
            self._take(self._missing[key], vector)
            self.late.add(self._missing[key][0])
        self._cache.count(hits=hits, joined=len(self._known.places) - hits)
        return self._known

    def computed(self, places: Sequence[int], vectors: npt.NDArray[np.float32], *, keep: bool) -> None:
        """Count the texts computed at these places and their duplicates, and store the vectors if `keep`."""
        joined = sum(len(self.duplicates(place)) for place in places) if self._duplicates else 0
        self._cache.count(joined=joined, misses=len(places))
        if keep:
            self._cache.put([self._keys[place] for place in places], vectors)

    def duplicates(self, place: int) -> list[int]:
        """The other places of the text that is computed at this one."""
        return self._duplicates.get(place, [])

    def _take(self, places: list[int], vector: bytes) -> None:
        self._known.places += places
        self._known.vectors += [vector] * len(places)

    def _sized(self, found: dict[bytes, bytes]) -> dict[bytes, bytes]:
        return {key: vector for key, vector in found.items() if len(vector) == self._vector_bytes}


def _keys(identity: bytes, texts: Sequence[Text]) -> list[bytes]:
    base = hashlib.blake2b(identity, digest_size=KEY_BYTES)
    keys = []
    for text in texts:
        digest = base.copy()
        # No UTF-8 begins with 0xff, so token ids never have the key of a string.
        digest.update(text.encode() if isinstance(text, str) else b"\xff" + np.array(text, dtype="<u4").tobytes())
        keys.append(digest.digest())
    return keys
