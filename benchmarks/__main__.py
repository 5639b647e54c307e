"""python -m benchmarks [NAME ...] [--json FILE] [--rounds N]: our system and the bare limit, in turns, in the same run.

bulk      20,000 no-op tasks of 100 bytes, durable, two workers        against the framed relay with a log
window    the same, one task a call, 64 in flight                      against a relay with one message a task
latency   2,000 tasks, one at a time                                   against the bare relay, also with engines
large     200 tasks of 1 MiB in and out: bytes in messages, as across  against the bare relay
          hosts; files that processes of one host share; ephemeral
embed     2,000 real sentences on the CPU                              against the best baseline
kill      1,000 tasks of 10 ms, a worker killed at half                against the ideal
requeue   kill -9 of a worker to the dispatch of its task elsewhere
backlog   a million queued tasks: memory, cost, recovery

Not among these, since they have options of their own (--help):
python -m benchmarks.load.scale   10, 100 and 1,000 fake workers: what the master pays for them
python -m benchmarks.load.core    the core alone, with up to 10,000 workers and 10,000,000 tasks
python -m benchmarks.load.soak    half an hour of mixed load and churn: nothing lost, nothing grows
python -m benchmarks.compare CASE --base DIR   two working trees in turns, in short bursts
python -m benchmarks.engines.batch_handler   a batching handler against the same model in a plain loop
python -m benchmarks.peers   the same workloads through NATS JetStream, PostgreSQL and Ray, in turns
"""

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from multigpu import AsyncClient

from benchmarks import relay
from benchmarks.backlog import bench_backlog
from benchmarks.embed import bench_embed
from benchmarks.faults import bench_kill, bench_requeue
from benchmarks.fleet import Fleet
from benchmarks.measure import median, payloads, percentile, table

N_BULK, N_LATENCY, N_LARGE, WINDOW = 20_000, 2_000, 200, 64
Row = dict[str, Any]


async def ours_bulk(client: AsyncClient, tasks: list[bytes]) -> float:
    start = time.perf_counter()
    got = [r async for r in client.map("echo", tasks)]
    seconds = time.perf_counter() - start
    assert got == tasks
    return seconds


async def ours_window(client: AsyncClient, tasks: list[bytes]) -> float:
    todo = iter(tasks)

    async def caller() -> None:
        for payload in todo:
            assert await client.run("echo", payload) == payload

    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(WINDOW)))
    return time.perf_counter() - start


async def ours_latency(client: AsyncClient, n: int) -> list[float]:
    payload, out = payloads(1)[0], []
    for _ in range(n):
        start = time.perf_counter()
        await client.run("echo", payload)
        out.append(time.perf_counter() - start)
    return out


def rooms(before: dict[str, float], after: dict[str, float], n: int) -> str:
    return ", ".join(f"{k} {(after[k] - before[k]) / n * 1e6:.1f}" for k in before)


def on_fleet(body: Callable[[AsyncClient, Fleet], Coroutine[Any, Any, Any]], master_flags: tuple[str, ...] = ()) -> Any:
    async def run(fleet: Fleet) -> Any:
        async with AsyncClient(fleet.address) as client:
            await client.run("echo", b"warm")
            return await body(client, fleet)

    with Fleet(master_flags=master_flags) as fleet:
        return relay.loop_runner("uvloop")(run(fleet))


def on_relay(mode: str, loop: str, body: Callable[[relay.Relay], Coroutine[Any, Any, Any]]) -> Any:
    with relay.Relay(mode, loop) as limit:
        return relay.loop_runner(loop)(body(limit))


def throughput(name: str, rounds: int, tasks: list[bytes], ours: Any, mode: str, window: int = 0) -> list[Row]:
    """Ours and the limit on both event loops, in turns."""
    n, seconds, cpu = len(tasks), dict[str, list[float]](), dict[str, str]()

    async def run_ours(client: AsyncClient, fleet: Fleet) -> None:
        await ours(client, tasks[: max(64, n // 4)])
        before = fleet.cpu()
        seconds.setdefault("multigpu", []).append(await ours(client, tasks))
        cpu["multigpu"] = rooms(before, fleet.cpu(), n)

    for _ in range(rounds):
        on_fleet(run_ours)
        for loop in ("uvloop", "asyncio"):

            async def run_relay(limit: relay.Relay, loop: str = loop) -> None:
                before: dict[str, float] = {}
                taken = await relay.throughput(limit.port, mode, tasks, window, lambda: before.update(limit.cpu()))
                seconds.setdefault(loop, []).append(taken)
                cpu[loop] = rooms(before, limit.cpu(), n)

            on_relay(mode, loop, run_relay)
    rates = {k: n / median(v) for k, v in seconds.items()}
    spread = {k: f"{n / max(v):,.0f} to {n / min(v):,.0f}" for k, v in seconds.items()}
    rows = []
    for who, rate in rates.items():
        subject = who if who == "multigpu" else f"bare relay, {mode}, {who}"
        row: Row = {"benchmark": name, "subject": subject, "tasks/s": f"{rate:,.0f}", "spread": spread[who]}
        row |= {"ours/this": f"{rates['multigpu'] / rate:.2f}", "CPU us a task": cpu[who]}
        rows.append(row)
    return rows


def bench_bulk(rounds: int) -> list[Row]:
    return throughput("bulk", rounds, payloads(N_BULK), ours_bulk, "log")


def bench_window(rounds: int) -> list[Row]:
    return throughput("window", rounds, payloads(N_BULK), ours_window, "message", WINDOW)


async def ours_ephemeral(client: AsyncClient, tasks: list[bytes]) -> float:
    start = time.perf_counter()
    got = [r async for r in client.map("echo", tasks, ephemeral=True)]
    seconds = time.perf_counter() - start
    assert got == tasks
    return seconds


# What is measured, the master's flags for it, and the share of the relay that is aimed at.
LARGE_FORMS: dict[str, tuple[Any, tuple[str, ...], float]] = {
    "messages, as across hosts": (ours_bulk, ("--no-share-payloads",), 0.85),
    "shared files, one host": (ours_bulk, (), 3.0),
    "shared files, ephemeral": (ours_ephemeral, (), 3.0),
}


def bench_large(rounds: int) -> list[Row]:
    """Each form with a relay beside it, in turns; the relay on whichever event loop was faster."""
    tasks = payloads(N_LARGE, 1 << 20)
    n, size = len(tasks), len(tasks[0])
    rates: dict[str, list[float]] = {}
    cpu: dict[str, list[dict[str, float]]] = {}

    def note(subject: str, seconds: float, before: dict[str, float], after: dict[str, float]) -> None:
        rates.setdefault(subject, []).append(n / seconds)
        cpu.setdefault(subject, []).append({k: (after[k] - before[k]) / n * 1e6 for k in before})

    def run_relay(loop: str) -> None:
        async def body(limit: relay.Relay) -> None:
            before: dict[str, float] = {}
            seconds = await relay.throughput(limit.port, "message", tasks, 0, lambda: before.update(limit.cpu()))
            note(f"bare relay, {loop}", seconds, before, limit.cpu())

        on_relay("message", loop, body)

    for _ in range(rounds):
        for form, (ours, flags, _) in LARGE_FORMS.items():

            async def run_ours(client: AsyncClient, fleet: Fleet, form: str = form, ours: Any = ours) -> None:
                await ours(client, tasks)
                before = fleet.cpu()
                seconds = await ours(client, tasks)
                note(form, seconds, before, fleet.cpu())

            on_fleet(run_ours, flags)
            run_relay("uvloop")
        run_relay("asyncio")
    limit = max(median(rates[f"bare relay, {loop}"]) for loop in ("uvloop", "asyncio"))
    limit_cpu = min(median([sum(c.values()) for c in cpu[f"bare relay, {loop}"]]) for loop in ("uvloop", "asyncio"))
    rows = []
    for subject, found in rates.items():
        rate, each = median(found), {k: median([c[k] for c in cpu[subject]]) for k in cpu[subject][0]}
        row: Row = {"benchmark": "large", "subject": subject, "tasks/s": f"{rate:,.0f}"}
        row |= {"spread": f"{min(found):,.0f} to {max(found):,.0f}", "MB/s": f"{rate * size / 1e6:,.0f}"}
        row |= {
            "of the relay": f"{rate / limit:.2f}",
            "target": LARGE_FORMS[subject][2] if subject in LARGE_FORMS else "",
        }
        row |= {"CPU us a task": ", ".join(f"{k} {v:.0f}" for k, v in each.items())}
        row |= {"the relay's CPU / this": f"{limit_cpu / sum(each.values()):.2f}"}
        rows.append(row)
    return rows


def bench_latency(rounds: int) -> list[Row]:
    found: dict[str, list[float]] = {}
    cpu: dict[str, str] = {}

    async def run_ours(client: AsyncClient, fleet: Fleet) -> None:
        await ours_latency(client, N_LATENCY // 4)
        before = fleet.cpu()
        found.setdefault("multigpu", []).extend(await ours_latency(client, N_LATENCY))
        cpu["multigpu"] = rooms(before, fleet.cpu(), N_LATENCY)

    for _ in range(rounds):
        on_fleet(run_ours)
        for mode, loop in (("message", "uvloop"), ("message", "asyncio"), ("engine", "uvloop")):
            subject = f"bare relay, {mode}, {loop}"

            async def run_relay(limit: relay.Relay, subject: str = subject) -> None:
                await relay.latencies(limit.port, payloads(1)[0], N_LATENCY // 4)
                before = limit.cpu()
                found.setdefault(subject, []).extend(await relay.latencies(limit.port, payloads(1)[0], N_LATENCY))
                cpu[subject] = rooms(before, limit.cpu(), N_LATENCY)

            on_relay(mode, loop, run_relay)
    p50 = {k: percentile(v, 0.5) * 1e3 for k, v in found.items()}
    return [
        {
            "benchmark": "latency",
            "subject": k,
            "p50 ms": f"{p50[k]:.3f}",
            "p99 ms": f"{percentile(v, 0.99) * 1e3:.3f}",
            "ours/this, p50": f"{p50['multigpu'] / p50[k]:.2f}",
            "p99/p50": f"{percentile(v, 0.99) * 1e3 / p50[k]:.1f}",
            "CPU us a task": cpu[k],
        }
        for k, v in found.items()
    ]


BENCHMARKS: dict[str, Callable[[int], list[Row]]] = {
    "bulk": bench_bulk,
    "window": bench_window,
    "latency": bench_latency,
    "large": bench_large,
    "embed": bench_embed,
    "kill": bench_kill,
    "requeue": bench_requeue,
    "backlog": bench_backlog,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="append the rows to this file")
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(BENCHMARKS)}")
    print(f"{platform.platform()}, Python {platform.python_version()}, {time.strftime('%F')}", file=sys.stderr)
    for name in options.names:
        rows = BENCHMARKS[name](options.rounds)
        print(table(rows) + "\n", flush=True)
        if options.json is not None:
            with options.json.open("a") as file:
                file.writelines(json.dumps(r) + "\n" for r in rows)


if __name__ == "__main__":
    main()
