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


@multigpu.handler("gang.train")
def train(options: dict[str, Any]) -> dict[str, Any]:
    """Steps of a model of one weight, with a checkpoint after each; rank `kills` ends its engine at step 3 once."""
    import torch
    import torch.distributed

    context = multigpu.context()
    context.init_process_group()
    begun = int(context.checkpoint or b"0")
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)  # keeps torch's store alive
    context.log.info("rank %d begins at step %d", context.rank, begun)
    for step in range(begun, options["steps"]):
        torch.autograd.backward((weight * (context.rank + 1)).sum())
        torch.distributed.all_reduce(weight.grad)
        optimizer.step()
        context.save_checkpoint(b"%d" % (step + 1))
        if folder := options.get("folder"):
            Path(folder, f"{context.attempt}-{context.rank}").write_text(str(os.getpid()))
        time.sleep(options.get("seconds", 0.0))
        if step == 3 and options.get("kills") == context.rank:
            try:
                Path(options["killed"]).touch(exist_ok=False)
            except FileExistsError:
                continue
            os._exit(3)
    return {"begun": begun, "rank": context.rank}


@multigpu.handler("gang.batched")
@multigpu.batch(max_size=4)
def batched(values: list[bytes]) -> list[bytes]:
    return values
