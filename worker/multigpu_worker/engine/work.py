"""A batch in the engine process: decoded from its frame, prepared by its engine, waiting for a slot."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from multigpu._transport.payloads import Writer, read_file

from multigpu_worker.engines.base import Batch, Engine, Item


@dataclass(slots=True)
class Work:
    batch_id: int
    batch: Batch
    # None: the batch can't run, and `prepared` is the exception.
    engine: Engine | None
    prepared: object
    # Items whose payloads can't be read, and why.
    lost: list[tuple[Item, str]]
    # Writes large results to a file; None: results are sent in the frame.
    writer: Writer | None
    # Leases of this batch that were given back to the agent unbegun. They may come again in another batch.
    given_back: set[int]


def items_of(rows: Iterable[Any], blobs: list[bytes]) -> tuple[list[Item], list[tuple[Item, str]]]:
    """The items of a batch's frame; and separately the items whose payloads can't be read, with the reasons.

    A row has the payload itself, its index in `blobs`, or its place in a file: the arguments of read_file.
    """
    items: list[Item] = []
    lost: list[tuple[Item, str]] = []
    for lease_id, task_id, attempt, sent, *rest in rows:
        payload = sent
        if type(sent) is int:
            payload = blobs[sent]
        elif type(sent) is tuple:
            try:
                payload = read_file(*sent)
            except OSError as error:
                lost.append((Item(lease_id, task_id, attempt, b"", *rest), str(error)))
                continue
        items.append(Item(lease_id, task_id, attempt, payload, *rest))
    return items, lost
