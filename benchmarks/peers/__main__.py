"""peers: the same workloads through multigpu and through other systems, in turns, on one machine.

    python -m benchmarks.peers --peers-dir DIR --venvs DIR [--rounds 3] [--quick] [--only NAME,...] [--json FILE]

The peers' DIR has `common.py` (the workloads), `tasks.py` (the task bodies) and `peers/*_peer.py`, one for each system,
with `requirements/*.txt`; the venvs' DIR has a virtual environment for each: nats, postgres, ray. The servers of NATS
and PostgreSQL are the host's (apt-get install nats-server postgresql).

Every system has two workers and its client on this machine, and implements each workload in its best way:

W1-bulk      20,000 no-op tasks of 100 bytes at once          tasks/s
W1-window64  the same, one task a call, 64 in flight          tasks/s
W2           2,000 tasks, one at a time                       ms, p50
W3           200 tasks of 1 MiB in and out                    MB/s
W4           1,000 tasks of 10 ms, a worker killed -9 at half s from the kill to the last result

They differ in durability, which the table shows: PostgreSQL syncs each task and result before it reports it; multigpu
syncs each task before it acknowledges it, and delivers a result while it is being written (if it is lost, the task runs
again, and the client still gets one result); NATS JetStream syncs tasks every two minutes and keeps no results; Ray
keeps everything in memory. multigpu and Ray replace a killed worker; with NATS and PostgreSQL the other one does the
rest alone.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import median, table

Row = dict[str, Any]
# Subject -> its virtual environment ("": this one) and about how many seconds it takes a round.
SUBJECTS = {
    "benchmarks.peers.ours": ("", 35),
    "benchmarks.peers.ours:Echo": ("", 15),
    "nats_peer": ("nats", 40),
    "pg_peer": ("postgres", 65),
    "ray_peer": ("ray", 65),
    "ray_peer:Actors": ("ray", 45),
}
# Workload -> its figure, whether more of it is better, and its unit.
WORKLOADS = {
    "W1-bulk": ("tasks_per_s", True, "tasks/s"),
    "W1-window64": ("tasks_per_s", True, "tasks/s"),
    "W2": ("p50_ms", False, "ms, p50"),
    "W3": ("mb_per_s", True, "MB/s"),
    "W4": ("kill_to_last_s", False, "s from kill to last result"),
}
TIMEOUT_S, QUICK = 300.0, 10


def once(subject: str, options: argparse.Namespace, workloads: Sequence[str]) -> tuple[Row, list[Row]]:
    """What the peer says of itself, and its figures. A peer that fails is said to, and has none."""
    venv = SUBJECTS[subject][0]
    python = sys.executable if not venv else str(options.venvs / venv / "bin" / "python")
    script = Path(__file__).with_name("run.py")
    root = str(Path(__file__).resolve().parent.parent.parent)
    # Ours is found from here; the others need nothing of it.
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH", "")])] if not venv else []
    command = [python, str(script), str(options.peers_dir), subject, str(QUICK if options.quick else 1), *workloads]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, errors = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            # With its servers and workers, which are of its process group unless they left it.
            os.killpg(process.pid, 9)
            raise
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if process.returncode:
        print(f"{subject} failed with {process.returncode}: {errors[-3000:]}", file=sys.stderr, flush=True)
    return (lines[0] if lines else {}), lines[1:]


def measure(options: argparse.Namespace) -> tuple[dict[str, Row], list[Row]]:
    """Every subject in turns, as many rounds as asked for."""
    abouts: dict[str, Row] = {}
    runs: list[Row] = []
    start, share = time.monotonic(), (0.35 if options.quick else 1.0)
    total = sum(SUBJECTS[s][1] for s in options.only) * options.rounds * share
    print(f"about {total / 60:.0f} minutes", file=sys.stderr, flush=True)
    passed = 0.0
    for number in range(options.rounds):
        for subject in options.only:
            # What is killed in W4 has a life of its own: no other workload inherits the state it leaves.
            for workloads in (list(WORKLOADS)[:-1], ["W4"]):
                about, found = once(subject, options, workloads)
                if about:
                    abouts[subject] = about
                runs += [{"subject": subject, "round": number + 1, **about, **f} for f in found]
                if options.json is not None:
                    with options.json.open("a") as file:
                        file.writelines(
                            json.dumps({"subject": subject, "round": number + 1, **about, **f}) + "\n" for f in found
                        )
            passed += SUBJECTS[subject][1] * share
            told = {f["workload"]: round(f[WORKLOADS[f["workload"]][0]], 2) for f in runs if f["subject"] == subject}
            left_s = (time.monotonic() - start) * (total / passed - 1)
            print(f"round {number + 1}, {subject}: {told}; {left_s / 60:.1f} minutes left", file=sys.stderr, flush=True)
    return abouts, runs


def number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.2f}"


def rows_of(workload: str, abouts: dict[str, Row], runs: Sequence[Row]) -> list[Row]:
    key, more, unit = WORKLOADS[workload]
    of = {s: [r for r in runs if r["subject"] == s and r["workload"] == workload] for s in abouts}
    ours = [r[key] for r in of.get("benchmarks.peers.ours", [])]
    rows = []
    for subject, found in of.items():
        if not found:
            continue
        values = [r[key] for r in found]
        row: Row = {
            "system": abouts[subject]["peer"],
            unit: f"{number(median(values))} ({number(min(values))} to {number(max(values))})",
        }
        if ours:
            ratio = median(ours) / median(values)
            row["times as good is ours"] = f"{ratio if more else 1 / ratio:.2f}"
        if workload == "W2":
            row["ms, p99"] = number(median([r["p99_ms"] for r in found]))
        if workload == "W4":
            row["missing"] = sum(r["missing"] for r in found)
            row["duplicates"] = sum(r["duplicates"] for r in found)
            row["ideal, s"] = number(median([r["kill_to_last_s"] - r["lost_time_s"] for r in found]))
            row["longest gap, s"] = number(median([r["longest_gap_s"] for r in found]))
        else:
            row["CPU us a task"] = number(median([r["cpu_s"] / r["n"] * 1e6 for r in found]))
        others = sum(r["foreign_s"] for r in found) / sum(r["wall_s"] for r in found) / (os.cpu_count() or 1)
        row["others' CPU, %"] = f"{max(0.0, others) * 100:.0f}"
        rows.append(row)
    return rows


def summary(abouts: dict[str, Row], runs: Sequence[Row]) -> str:
    """Markdown: what each system keeps, then a table for each workload."""
    kept = [{"system": a["peer"], "version": a["version"], "durable": a["durable"]} for a in abouts.values()]
    parts = [table(kept)]
    for workload in WORKLOADS:
        if rows := rows_of(workload, abouts, runs):
            parts.append(f"**{workload}**\n\n{table(rows)}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )

    def names(text: str) -> list[str]:
        found = [s for s in SUBJECTS if any(s.startswith(part) for part in text.split(","))]
        if not found:
            raise argparse.ArgumentTypeError(f"there are: {', '.join(SUBJECTS)}")
        return found

    parser.add_argument("--peers-dir", type=Path, required=True, help="the workloads' and the peers' code")
    parser.add_argument("--venvs", type=Path, required=True, help="a virtual environment for each peer: DIR/ray, …")
    parser.add_argument("--only", type=names, default=list(SUBJECTS), help="beginnings of names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help=f"a {QUICK}th of the tasks: to see that all of it works")
    parser.add_argument("--json", type=Path, help="append every single figure to this file")
    options = parser.parse_args()
    options.peers_dir, options.venvs = options.peers_dir.resolve(), options.venvs.resolve()
    print(summary(*measure(options)))


if __name__ == "__main__":
    main()
