"""A training in which rank 1 hangs: in a forward pass, in a data loader, or in another branch.

It sleeps until the trial ends it. The comments mark the lines that the test expects in the message.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WHERE = sys.argv[-1]  # of the baseline: this file


class Slow(nn.Module):
    def forward(self, inputs):
        if WHERE == "forward" and hangs():
            time.sleep(600)  # in forward
        return inputs


class Samples(TensorDataset):
    def __getitem__(self, index):
        if WHERE == "loader" and hangs():
            time.sleep(600)  # in loader
        return super().__getitem__(index)


def hangs():
    if step != 2 or dist.get_rank() != 1:
        return False
    Path("hangs").touch()  # tests that wait for this moment look for the file
    return True


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), Slow())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = Samples(torch.randn(64, 4))
step = 0
for step, (inputs,) in enumerate(DataLoader(data, batch_size=4)):  # noqa: B007
    optimizer.zero_grad()
    model(inputs).sum().backward()
    for parameter in model.parameters():
        if not (WHERE == "branch" and hangs()):
            dist.all_reduce(parameter.grad)
    if WHERE == "branch" and hangs():
        dist.barrier()  # in branch
    optimizer.step()
