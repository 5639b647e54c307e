"""`python -m benchmarks.engines.models`: twenty models on two workers that hold five each, an hour of load compressed.

The models are small engines that take different memory and time to load. The load has phases: a few popular models
(Zipf), uniform, a burst for each model in turn, single tasks, and Zipf again with other favourites. The loaded models
of each worker are sampled. The benchmark checks that:
- every result came from the requested model, and none is missing;
- no sample shows a worker above its limit, except within a second of the first load of a model, when its size becomes
  known (such samples are counted);
- there were at most as many loads as an LRU cache of the same size would make that serves the same tasks one by one.
  (In a run of a few seconds first loads weigh more: one cache holds a model once, workers may each have to load it.)

`--again` restarts the fleet and repeats the load: the sizes of all models are known then.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from multigpu import AsyncClient
from multigpu.v1 import admin_service_pb2 as admin_pb
from multigpu.v1 import model_pb2

from benchmarks.measure import percentile
from tests.fleet import Fleet, until

MODELS, WORKERS, ROOM = 20, 2, 5
MIB = 1 << 20
# What a model takes is known once it was loaded: if that is too much, its worker has so long to unload another.
SETTLING_S = 1.0
KIND = "infer"
ENGINE = """
import os, time

class Toy:
    one_by_one = False

    def __init__(self, settings):
        (self.model, self.spec), = settings.models.items()

    def load(self):
        parameters = self.spec.parameters
        time.sleep(float(parameters["load_s"]))
        self.ballast = os.urandom(4096) * (int(parameters["size_bytes"]) // 4096)
        return {}

    def prepare(self, batch):
        return None

    def run(self, batch, prepared, reporter):
        for item in batch.items:
            time.sleep(float(self.spec.parameters["run_s"]))
            reporter.succeed(item, self.model.encode() + b" " + item.payload)

    def close(self):
        pass
"""


@dataclass
class Run:
    """What was seen."""

    tasks: int = 0
    wrong: list[str] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    samples: int = 0
    most_share: float = 0.0  # of a worker's room that was taken in any sample
    over: list[str] = field(default_factory=list)
    settling: int = 0  # samples over the room right after a first loading: what it takes was just measured
    loads: dict[tuple[str, str], int] = field(default_factory=dict)
    loading_s: dict[str, float] = field(default_factory=dict)  # by worker: time in which it loaded something
    sizes: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0


def repository(folder: Path, dice: random.Random, scale: float) -> list[str]:
    """Writes the models; returns their names."""
    names = [f"toy{n:02}" for n in range(MODELS)]
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "toy.py").write_text(ENGINE)
        values = {
            "load_s": scale * dice.uniform(0.1, 0.5),
            "size_bytes": dice.randrange(4, 24) * MIB,
            "run_s": 0.002,
        }
        lines = [f'kind = "{KIND}"', 'engine = "toy:Toy"', "[parameters]"]
        lines += [f"{key} = {json.dumps(str(value))}" for key, value in values.items()]
        (folder / name / "model.toml").write_text("\n".join(lines) + "\n")
    return names


def load(names: list[str], dice: random.Random, seconds: float) -> Iterator[tuple[float, str]]:
    """When (seconds from the start) which model is asked."""
    zipf = [1 / (n + 1) for n in range(len(names))]
    phases = ("zipf", "uniform", "bursts", "quiet", "other favourites")
    each_s = seconds / len(phases)
    for nth, phase in enumerate(phases):
        at_s, until_s = nth * each_s, (nth + 1) * each_s
        order = names if phase != "other favourites" else names[::-1]
        turn = 0
        while at_s < until_s:
            if phase == "bursts":
                name = names[turn % len(names)]
                turn += 1
                yield from ((at_s, name) for _ in range(20))
                at_s += each_s / 10
            elif phase == "quiet":
                yield at_s, dice.choice(names)
                at_s += dice.expovariate(2.0)
            else:
                yield at_s, dice.choices(order, zipf if phase != "uniform" else None)[0]
                at_s += dice.expovariate(60.0 if phase != "uniform" else 30.0)


def lru_loads(asked: list[str], sizes: dict[str, int], room_bytes: int) -> int:
    """The loadings of a plain cache that serves the same tasks one by one."""
    resident: OrderedDict[str, int] = OrderedDict()
    loads = 0
    for name in asked:
        if name not in resident:
            loads += 1
            while resident and sum(resident.values()) + sizes[name] > room_bytes:
                resident.popitem(last=False)
        resident[name] = sizes[name]
        resident.move_to_end(name)
    return loads


def watch(fleet: Fleet, run: Run, ended: threading.Event) -> None:
    """Samples what the workers have loaded."""
    last_s = time.monotonic()
    first_s: dict[tuple[str, str], float] = {}  # when each was first seen to be ready
    while not ended.wait(0.02):
        now_s = time.monotonic()
        workers = fleet.admin.ListWorkers(admin_pb.ListWorkersRequest(), timeout=20).workers
        for worker in workers:
            run.samples += 1
            taken = sum(m.memory_bytes for m in worker.models)
            run.most_share = max(run.most_share, taken / worker.model_memory_bytes)
            for m in worker.models:
                if m.state == model_pb2.MODEL_STATE_READY:
                    first_s.setdefault((worker.worker_id, m.model), now_s)
            if (
                taken > worker.model_memory_bytes
                and now_s - max((at_s for (who, _), at_s in first_s.items() if who == worker.worker_id), default=0.0)
                < SETTLING_S
            ):
                run.settling += 1
            elif taken > worker.model_memory_bytes:
                run.over.append(f"{worker.worker_id}: {taken} of {worker.model_memory_bytes} bytes")
            for m in worker.models:
                run.loads[worker.worker_id, m.model] = m.loads
                if m.state == model_pb2.MODEL_STATE_READY:
                    run.sizes[m.model] = m.memory_bytes
            if any(m.state == model_pb2.MODEL_STATE_LOADING for m in worker.models):
                run.loading_s[worker.worker_id] = run.loading_s.get(worker.worker_id, 0.0) + now_s - last_s
        last_s = now_s


def measure_one(folder: Path, names: list[str]) -> int:
    """What a toy takes, as a worker measures it; no later one knows of it."""
    flags = ("--model-repository", str(folder.parent / "models"), "--artifacts-dir", str(folder / "artifacts"))
    with Fleet(folder, workers=1, worker_flags=flags) as fleet:
        fleet.admin.LoadModel(admin_pb.LoadModelRequest(model=names[0]), timeout=20)

        def ready() -> int:
            places = [r for w in fleet.list_workers() for r in w.models if r.state == model_pb2.MODEL_STATE_READY]
            return places[0].memory_bytes if places else 0

        return until(ready, 60.0, "the first model")


async def send(address: str, asked: list[tuple[float, str]], run: Run) -> None:
    """Sends every task at its time, and looks at the answers."""
    async with AsyncClient(address) as client:
        began_s = time.monotonic()

        async def one(nth: int, name: str) -> None:
            sent_s = time.monotonic()
            answer = bytes(await client.run(KIND, f"{nth}".encode(), model=name))
            run.took_s.append(time.monotonic() - sent_s)
            run.tasks += 1
            if answer != f"{name} {nth}".encode():
                run.wrong.append(f"task {nth} asked {name}, got {answer!r}")

        async with asyncio.TaskGroup() as tasks:
            for nth, (at_s, name) in enumerate(asked):
                await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
                tasks.create_task(one(nth, name))
        run.wall_s = time.monotonic() - began_s


def drive(folder: Path, seconds: float, seed: int, scale: float) -> tuple[Run, list[tuple[float, str]], int]:
    """The whole run: what was seen, what was asked and when, the room of one worker."""
    dice = random.Random(seed)
    names = repository(folder / "models", dice, scale)
    size = int((folder / "models" / names[0] / "model.toml").read_text().split('size_bytes = "')[1].split('"')[0])
    room = ROOM * (measure_one(folder / "one", names) - size + 14 * MIB)
    asked = list(load(names, dice, seconds))
    return send_all(folder, asked, room, "fleet"), asked, room


def send_all(folder: Path, asked: list[tuple[float, str]], room: int, name: str) -> Run:
    """A fleet of its own is asked for the models that are in the folder by now."""
    flags = ("--model-repository", str(folder / "models"), "--model-memory-bytes", str(room))
    artifacts = ("--artifacts-dir", str(folder / "artifacts"))
    run, ended = Run(), threading.Event()
    with Fleet(folder / name, workers=WORKERS, worker_flags=(*flags, *artifacts)) as fleet:
        watcher = threading.Thread(target=watch, args=(fleet, run, ended))
        watcher.start()
        try:
            asyncio.run(send(fleet.address, asked, run))
            time.sleep(0.5)  # the last heartbeats
        finally:
            ended.set()
            watcher.join()
    return run


def judge(run: Run, asked: list[tuple[float, str]], room: int, *, first_loads: int = 0) -> tuple[int, int]:
    """AssertionError: a promise was broken. Returns the loadings, and the bound.

    `first_loads`: how many loadings more than a cache's are allowed.
    """
    assert not run.wrong, run.wrong[:3]
    assert run.tasks == len(asked)
    assert not run.over, run.over[:3]
    loads = sum(run.loads.values())
    bound = lru_loads([name for _, name in asked], run.sizes, WORKERS * room) + first_loads
    assert loads <= bound, f"{loads} loadings; at most {bound} are allowed"
    return loads, bound


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.models", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long tasks are sent")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of the loading times")
    parser.add_argument("--again", action="store_true", help="once more, after a restart")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, asked, room = drive(Path(folder), args.seconds, args.seed, args.scale)
        tell(run, asked, room)
        if args.again:
            print("again, after a restart:")
            tell(send_all(Path(folder), asked, room, "again"), asked, room)
    return 0


def tell(run: Run, asked: list[tuple[float, str]], room: int) -> None:
    loads, bound = judge(run, asked, room)
    print(
        f"{run.tasks:,} tasks for {MODELS} models in {run.wall_s:.1f} s, all right; room {room / MIB:.0f} MiB a worker"
    )
    print(f"residency: {run.samples:,} samples, at most {run.most_share:.1%} of a worker's room")
    print(f"of them over the room, within {SETTLING_S:g} s of a first loading: {run.settling}")
    print(f"loadings: {loads}; a plain cache that serves the same tasks one by one makes {bound}")
    for worker, seconds in sorted(run.loading_s.items()):
        print(f"{worker} was loading for {seconds / run.wall_s:.0%} of the time")
    p50, p99, most = (percentile(run.took_s, share) for share in (0.5, 0.99, 1.0))
    print(f"from sending to the answer: p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, most {most * 1e3:.0f} ms")


if __name__ == "__main__":
    sys.exit(main())
