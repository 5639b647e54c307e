"""The ids that a master issues, and how later masters recognise them.

An id of a task or a lease has 29 bits of epoch above 24 bits of counter. So it is below 2**53, the end of JavaScript's
exact integers. The journal syncs an epoch to the disk before the master uses the epoch's first id. The epoch is the
wall clock in whole seconds since 2025, and the counter starts at the fraction of the second times 2**23: a master on an
empty journal or on an older copy repeats no id, even if it starts in the same second as its predecessor. Each new epoch
is above the journal's last epoch.

Each start of a master is an incarnation with a random name, which the journal keeps. A cursor is the number of
an outcome in journal order; clients get cursors from Watch. A lease_id or a cursor that a peer holds is valid only if
the journal knows the incarnation that issued it, and the next incarnation, if any, began at a higher id or cursor.
Otherwise this is a different journal or an older copy, or INCARNATIONS_MAX masters have started since then. See
docs/decisions/0015-ids-and-incarnations.md.
"""

import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise

from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from multigpu_master.core.model import EPOCH_IDS
from multigpu_master.errors import JournalError

EPOCHS_END = (1 << 53) // EPOCH_IDS  # exclusive upper bound of the epochs
# Epochs are seconds since 2025-01-01T00:00:00Z, and so last until January 2042.
FIRST_EPOCH_S = 1_735_689_600
TIME_END_S = FIRST_EPOCH_S + EPOCHS_END
CURSORS_END = 1 << 63
LEASE_KEY_BYTES = 32
_WORD_MASK = (1 << 64) - 1
# A journal keeps the newest incarnations, at most this many. Leases and cursors of older ones are not valid.
INCARNATIONS_MAX = 1000


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One start of a master, with its first id and cursor."""

    name: str
    first_id: int
    first_cursor: int


def first_id(epoch: int, now_s: float = 0.0) -> int:
    """Returns the id with which a master begins an epoch at the time `now_s`. It is in the first half of the epoch."""
    return epoch * EPOCH_IDS + int(now_s % 1.0 * (EPOCH_IDS // 2))


def new_incarnation_name() -> str:
    return secrets.token_hex(8)


def next_epoch(last: int, now_s: float) -> int:
    """Returns the epoch to begin now, after the journal's newest epoch `last`. Raises JournalError if its ids would not
    be below 2**53.
    """
    epoch = max(last + 1, int(now_s) - FIRST_EPOCH_S)
    if epoch >= EPOCHS_END:
        raise JournalError(
            f"The ids of this journal are used up: its last epoch is {last}, the epoch of this host's clock is "
            f"{int(now_s) - FIRST_EPOCH_S}, and {EPOCHS_END - 1} is the highest. Set the clock if it is wrong, or move "
            "the data directory away to begin with an empty journal."
        )
    return epoch


class LeaseProofs:
    """A lease's proof shows a later master which worker got the lease, because leases are not journaled. The proof
    is the first 8 bytes of AES(key=blake2b(worker_id, journal key), block=(task_id, lease_id ^ attempt << 53)).
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._encryptor = lru_cache(maxsize=1024)(self._make_encryptor)

    def of(
        self, worker_id: str, lease_ids: Sequence[int], task_ids: Sequence[int], attempts: Sequence[int]
    ) -> Sequence[int]:
        """Returns a proof for each of a worker's leases. Element n of every list belongs to lease n."""
        words = [0] * (2 * len(lease_ids))
        words[::2] = task_ids
        # Ids are below 2**53, so the bits above are for the attempt.
        words[1::2] = [lease ^ (attempt << 53 & _WORD_MASK) for lease, attempt in zip(lease_ids, attempts, strict=True)]
        layout = f"<{len(words)}Q"
        return struct.unpack(layout, self._encryptor(worker_id).update(struct.pack(layout, *words)))[::2]

    def _make_encryptor(self, worker_id: str) -> CipherContext:
        key = blake2b(worker_id.encode(), digest_size=16, key=self._key).digest()
        return Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305  no two leases have the same block


class Incarnations:
    """The incarnations that the journal knows, oldest first; the last one is this master."""

    def __init__(self, known: Sequence[Incarnation]) -> None:
        self.current = known[-1].name
        self._ends = {one.name: (after.first_id, after.first_cursor) for one, after in pairwise(known)}
        self._ends[self.current] = EPOCHS_END * EPOCH_IDS, CURSORS_END

    def ids_end(self, name: str) -> int:
        """Exclusive upper bound of the incarnation's ids; 0 if it is unknown."""
        return self._ends.get(name, (0, 0))[0]

    def cursors_end(self, name: str) -> int:
        """Exclusive upper bound of the incarnation's cursors; 0 if it is unknown."""
        return self._ends.get(name, (0, 0))[1]
