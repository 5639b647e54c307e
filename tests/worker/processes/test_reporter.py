"""The reporter of a batch, with the agent's end of its socket."""

import queue
import socket
import threading
from typing import Any

from multigpu_worker.engine.channel import AgentChannel
from multigpu_worker.engine.leases import Leases
from multigpu_worker.engine.reporter import BatchReporter, Reporting, flush_forever
from multigpu_worker.engine.work import Work
from multigpu_worker.engines.base import Batch, Item
from multigpu_worker.processes.ipc import frames
from multigpu_worker.processes.ipc.blobs import BlobMemory
from multigpu_worker.processes.ipc.slots import SlotPage


def test_results_of_short_tasks_do_not_wait_for_a_long_one() -> None:
    """The engine begins all tasks at once, as embed, infer and classify do, and computes in steps."""
    agent, engine = socket.socketpair()
    agent.settimeout(10.0)
    blobs = BlobMemory.create()
    channel = AgentChannel(engine, blobs)
    limits: Any = {"result_bytes_max": 1 << 20, "embedding_cache": dict, "unflushed": queue.SimpleQueue()}
    shared = Reporting(channel=channel, leases=Leases(channel), page=SlotPage.create(1), **limits)
    threading.Thread(target=flush_forever, args=(shared.unflushed,), daemon=True).start()
    items = [Item(n, n, 1, b"", 1, b"", 0) for n in range(1, 9)]
    reporter = BatchReporter(shared, Work(1, Batch("k", "", {}, "", items), None, None, [], None, set()), 0)
    reporter.begin_all()
    for item in items[:-1]:
        reporter.succeed(item, b"done")
    reporter.beat()  # the long task goes on
    decoder = frames.Decoder(blobs.up)
    ended: set[int] = set()
    while len(ended) < 7:
        ended |= {row[0] for message, _ in decoder.feed(agent) if message[0] == "reports" for row in message[4]}
    assert ended == set(range(1, 8))
