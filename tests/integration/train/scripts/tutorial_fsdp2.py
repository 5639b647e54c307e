"""As PyTorch's tutorial on FSDP2 (fully_shard); on CPUs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        loss = model(torch.randn(8, 16)).sum()
        loss.backward()
        optim.step()
        optim.zero_grad()
    print(f"sharded over {mesh.size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
