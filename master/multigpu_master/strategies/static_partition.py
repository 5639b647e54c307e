"""static_partition: one key, one worker, by rendezvous hashing (Thaler and Ravishankar, 1998).

The strategy hashes each key with each worker_id; the tasks of a key go to the worker with the highest hash. When a
worker is lost, only its keys move, each to the worker with the next highest hash; when a worker joins, it takes over
only the keys for which its hash is the highest. Keys are first mapped to 4,096 partitions, so that the master's memory
does not grow with the number of keys. For a task without a key, the model is hashed, or else the kind.
"""

from hashlib import blake2b
from typing import ClassVar

from multigpu_master.core.model import Shape, Worker
from multigpu_master.core.strategy import FleetView, Strategy


class StaticPartition(Strategy):
    name: ClassVar[str] = "static_partition"
    summary: ClassVar[str] = "The same partition_key (else model) goes to the same worker while it lives."
    score_meaning: ClassVar[str] = "one minus the hash of key and worker, 0 to 1"
    pinned: ClassVar[bool] = True

    def score(self, shape: Shape, worker: Worker, fleet: FleetView) -> float:
        key = f"#{shape.partition}" if shape.partition >= 0 else shape.model or shape.kind
        digest = blake2b(f"{key}\0{worker.worker_id}".encode(), digest_size=8).digest()
        return 1.0 - int.from_bytes(digest) / 2**64
