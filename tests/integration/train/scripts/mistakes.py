"""Goes wrong, as its argument says."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

how, rank = sys.argv[1], int(os.environ["RANK"])
again = Path(os.environ["MULTIGPU_JOB_FOLDER"], "again")
if how == "raises":
    print("before the error")
    if rank == 1:
        raise ValueError("there is no such column: text")
    time.sleep(600)
if how == "in a collective":
    dist.init_process_group("gloo")
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()
if how == "once" and rank == 0 and not again.exists():
    again.touch()
    sys.exit(3)
if how == "killed once" and rank == 1 and not again.exists():
    again.touch()
    os.kill(os.getpid(), signal.SIGKILL)
if how in ("once", "killed once"):
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
if how == "forgets finish":
    dist.init_process_group("gloo")
    from multigpu import train

    model = torch.nn.Linear(64, 64)
    fully_shard(model)
    print("begins at", train.restore({"model": model}), flush=True)
    train.checkpoint({"model": model}, 1, wait=True)
    for step in range(2, 12):
        train.checkpoint({"model": model}, step)
    dist.destroy_process_group()
if how == "aborts after an error":
    print("Traceback (most recent call last):\n  File\nOSError: no space", file=sys.stderr)
    os.abort()
if how == "shows a bar":
    for percent in range(100):
        print(f"\r{percent} %", end="", file=sys.stderr, flush=True)
        time.sleep(0.1)
if how == "hangs":
    dist.init_process_group("gloo")
    print("before", flush=True)

    def work() -> None:
        if rank == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))

    work()
if how == "one ends later" and rank == 1:
    time.sleep(3)
if how == "where":
    print(Path.cwd())
if how == "ignores SIGTERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(os.environ["MULTIGPU_JOB_FOLDER"], f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(600)
