"""All abuses, and the command that runs them."""

import sys
import tempfile
from pathlib import Path

import click
import grpc

from tests.hostile.abuses import connections, endless, messages
from tests.hostile.abuses.base import MIB, Abuse, abused, suffer

ABUSES = [
    Abuse("idle connections", connections.idle_connections, short=1_500, long=5_000),
    Abuse("streams opened and dropped", connections.dropped_streams, short=400, long=10_000),
    Abuse("watches that nobody reads", connections.open_watches, short=50, long=1_000, memory_max_bytes=1200 * MIB),
    Abuse("workers that never read", connections.silent_workers, short=3, long=50),
    Abuse("large metadata", messages.large_metadata, short=10, long=100),
    Abuse("large messages and names", messages.large_messages, short=1, long=20, memory_max_bytes=300 * MIB),
    Abuse("tasks in one frame", messages.many_in_one_frame, short=20_000, long=1_000_000, memory_max_bytes=600 * MIB),
    Abuse("fields of two bytes, MiB", messages.small_fields, short=8, long=60, memory_max_bytes=500 * MIB),
    Abuse("specs without tasks", messages.own_specs, short=2, long=20),
    Abuse("empty batches", messages.empty_batches, short=100_000, long=5_000_000, memory_max_bytes=1200 * MIB),
    Abuse(
        "cancels of unknown tasks", messages.unknown_cancels, short=50_000, long=2_000_000, memory_max_bytes=600 * MIB
    ),
    Abuse("huge pages", messages.huge_pages, short=5, long=1_000),
    Abuse("submits without end, MiB", endless.endless_submits, short=160, long=1_000, memory_max_bytes=300 * MIB),
    # Each stream has a limit; all streams together have none.
    Abuse("outcomes that nobody reads, MiB", endless.slow_reader, short=64, long=400, memory_max_bytes=1200 * MIB),
    Abuse("distinct names", endless.distinct_names, short=2_000, long=100_000),
    Abuse("own requirements", endless.own_requirements, short=2_400, long=10_000, memory_max_bytes=600 * MIB),
    Abuse("settled tasks again", endless.settled_again, short=8, long=16, memory_max_bytes=1200 * MIB),
    Abuse("distinct workers", endless.distinct_workers, short=100, long=5_000),
    Abuse("distinct queues by an operator", endless.distinct_admin_queues, short=100, long=20_000),
]


@click.command(name="abuse")
def command() -> None:
    """Exhausts the master's memory, time, streams and names. Exit code 1: it suffered."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="multigpu-abuse-") as folder, abused(Path(folder)) as fleet:
        print(
            f"{'abuse':34}{'size':>10}{'PSS MiB: before':>17}{'peak':>7}{'after':>7}{'s':>7}{'slowest s':>11}  answer"
        )
        for abuse in ABUSES:
            try:
                cost = suffer(fleet, abuse, abuse.long)
            except (AssertionError, grpc.RpcError) as error:
                failed += 1
                print(f"{abuse.name:34}{abuse.long:>10,} FAILED: {str(error)[:700]}", flush=True)
                continue
            memory = [b // MIB for b in (cost.before_bytes, cost.peak_bytes, cost.after_bytes)]
            print(
                f"{abuse.name:34}{abuse.long:>10,}{memory[0]:>17}{memory[1]:>7}{memory[2]:>7}{cost.seconds:>7.1f}"
                f"{cost.slowest_s:>11.2f}  {cost.answer}",
                flush=True,
            )
    sys.exit(1 if failed else 0)
