"""Goes wrong, as its argument says."""

import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

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
if how == "ignores SIGTERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(os.environ["MULTIGPU_JOB_FOLDER"], f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(600)
