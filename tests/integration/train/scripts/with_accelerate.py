"""A training loop with accelerate, as its documentation shows it."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for inputs, targets in data:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
accelerator.print(f"processes: {accelerator.num_processes}, {accelerator.distributed_type}")
accelerator.end_training()
