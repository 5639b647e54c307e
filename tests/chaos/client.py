"""python -m tests.chaos.client '<json>': one client, a process of its own, so that it can be killed like the rest.

It ends with 0 when all tasks of a round are done, by every kind of call that a client has. A watching client never
ends.
"""

import asyncio
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.chaos import traffic
from tests.chaos.records.history import History
from tests.chaos.traffic import LARGE, Life

# Of a hundred tasks of a round, how many use which kind of call.
SHARES = {"submit": 34, "run": 16, "map": 24, "stream": 6, "cancel": 6, "ephemeral": 9, "lend": 5}


def names_of(number: int, tasks: int) -> dict[str, list[str]]:
    """The request_ids of a round, by kind of call. One in ten of Submit and map has a large payload."""
    names = {}
    for way, share in SHARES.items():
        count = max(1, tasks * share // 100)
        names[way] = [f"r{number}-{way}-{i}" for i in range(count)]
    for way in ("submit", "map"):
        names[way] = [f"{n}-{LARGE}" if i % 10 == 7 else n for i, n in enumerate(names[way])]
    return names


def durable_names(names: dict[str, list[str]]) -> set[str]:
    """The request_ids whose outcomes a watch gets."""
    return {name for way, some in names.items() if way not in ("ephemeral", "lend") for name in some}


def work(life: Life, names: dict[str, list[str]]) -> None:
    """Everything at once."""

    async def calls() -> None:
        await asyncio.gather(
            traffic.map_all(life, names["map"], "map"),
            traffic.map_all(life, names["ephemeral"], "ephemeral", ephemeral=True),
            traffic.stream_all(life, names["stream"][::2]),
        )

    ways: list[tuple[Any, ...]] = [
        (traffic.submit, life, names["submit"]), (traffic.run, life, names["run"]),
        (traffic.cancel, life, names["cancel"]), (traffic.stream_raw, life, names["stream"][1::2]),
        (traffic.lend, life, names["lend"]), (asyncio.run, calls()),
    ]  # fmt: skip
    with ThreadPoolExecutor(len(ways)) as pool:
        for ended in [pool.submit(*way) for way in ways]:
            ended.result()


def main() -> None:
    arguments = json.loads(sys.argv[1])
    folder = Path(arguments["history"])
    path = folder / arguments["file"]
    life = Life(
        address=arguments["address"], folder=folder, history=History(path), number=arguments["life"],
        dice=random.Random(arguments["seed"]),
    )  # fmt: skip
    match arguments["way"]:
        case "work":
            work(life, names_of(arguments["round"], arguments["tasks"]))
        case "watch":
            traffic.watch(life, path)
        case "replay":
            traffic.watch(life, path, by="replay", until_quiet=True)


if __name__ == "__main__":
    main()
