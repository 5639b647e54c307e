"""As PyTorch's tutorial on DistributedDataParallel with torchrun; on CPUs."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net2(self.relu(self.net1(x)))
        return outputs


def demo_basic() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"Start running basic DDP example on rank {rank}.")
    assert int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
    assert dist.is_torchelastic_launched()
    torch.manual_seed(0)
    ddp_model = DistributedDataParallel(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    data = TensorDataset(torch.randn(40, 10), torch.randn(40, 5))
    for inputs, labels in DataLoader(data, batch_size=10, sampler=DistributedSampler(data), num_workers=1):
        optimizer.zero_grad()
        loss_fn(ddp_model(inputs), labels).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    print(f"Finished running basic DDP example on rank {rank}.")


if __name__ == "__main__":
    demo_basic()
