"""Trains a small model, with a checkpoint every few steps. Each rank leaves its pid in the job's folder."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from multigpu import train
from torch.nn.parallel import DistributedDataParallel

SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--shard", action="store_true")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = Path(os.environ["MULTIGPU_JOB_FOLDER"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Tanh(), torch.nn.Linear(SIZE, 1))
    if options.shard:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    begin = train.restore(state)
    print(f"rank {rank} of {size} begins at step {begin}", flush=True)
    with (folder / f"steps-{rank}").open("a") as steps:
        for step in range(begin, options.steps):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(12, SIZE, generator=generator)
            loss = ((model(inputs[rank::size]) - inputs[rank::size].sum(1, keepdim=True)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            train.report({"loss": total.item() / size}, step=step + 1, fraction=(step + 1) / options.steps)
            steps.write(f"{step}\n")
            steps.flush()
            if (step + 1) % options.every == 0:
                train.checkpoint(state, step + 1)
            time.sleep(options.sleep)
    train.finish()
    weights = [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten().tolist() for p in model.parameters()
    ]
    if rank == 0:
        (folder / "weights.json").write_text(json.dumps(weights))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
