"""static_partition: one key, one worker, by rendezvous hashing (Thaler and Ravishankar, 1998).

Every worker scores every key by a hash of both, and the highest has it. When a worker is lost only its keys move, each
to the worker that came second; when one joins it takes over just the keys that it scores highest. Keys are folded into
4,096 partitions first, so that the master's memory doesn't grow with their number. A task without a key goes by its
model, or else by its kind.
"""

from hashlib import blake2b
from typing import ClassVar

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import FleetView
from multigpu_master.strategies.base import Base


class StaticPartition(Base):
    name: ClassVar[str] = "static_partition"
    summary: ClassVar[str] = "The same partition_key (else model) goes to the same worker while it lives."
    score_meaning: ClassVar[str] = "one minus the hash of key and worker, 0 to 1"
    pinned: ClassVar[bool] = True

    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        key = f"#{shape.partition}" if shape.partition >= 0 else shape.model or shape.kind
        digest = blake2b(f"{key}\0{worker.worker_id}".encode(), digest_size=8).digest()
        return 1.0 - int.from_bytes(digest) / 2**64
