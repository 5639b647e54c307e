"""Handlers that several workers run at the same time."""

import os
import time
from pathlib import Path
from typing import Any

import multigpu


@multigpu.handler("gang.sum")
def add_ranks(options: dict[str, Any]) -> dict[str, float]:
    """The sum of 1, 2, ... over all ranks, by torch.distributed. Each rank leaves its pid in the folder."""
    import torch
    import torch.distributed

    context = multigpu.context()
    context.init_process_group()
    if folder := options.get("folder"):
        Path(folder, f"{context.attempt}-{context.rank}").write_text(str(os.getpid()))
    time.sleep(options.get("seconds", 0.0))
    value = torch.tensor([float(context.rank + 1)])
    torch.distributed.all_reduce(value)
    return {"sum": value.item(), "rank": context.rank, "world_size": context.world_size}


@multigpu.handler("gang.fails")
def fail_on_rank_1(options: dict[str, Any]) -> None:
    """Rank 1 raises; the others wait for it."""
    import torch.distributed

    context = multigpu.context()
    context.init_process_group()
    if context.rank == 1:
        raise ValueError("rank 1 has had enough")
    torch.distributed.barrier()


@multigpu.handler("gang.parameters")
def parameters(options: dict[str, Any]) -> dict[str, str]:
    return dict(multigpu.context().parameters)
