"""Trains a model with DistributedDataParallel, for benchmarks/training.py. Rank 0 writes the time of each step."""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from multigpu import train
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--checkpoint-every", type=int, default=0)
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
model = DistributedDataParallel(torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(8, 64, 256)
times = []
for step in range(1, options.steps + 1):
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    times.append(time.time())
    if options.checkpoint_every and step % options.checkpoint_every == 0:
        train.checkpoint({"model": model, "optimizer": optimizer}, step)
train.finish()
if dist.get_rank() == 0:
    options.out.write_text("\n".join(map(repr, times)))
dist.destroy_process_group()
