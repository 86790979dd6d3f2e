"""Train with FSDP 1: an optimiser has flat parameters, or parts of the original ones."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS = 16, 4

parser = argparse.ArgumentParser()
parser.add_argument("--originals", default="no")
options = parser.parse_args()
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))  # 43 and 24 elements
if ranks > 1:
    dist.init_process_group("gloo")
    keys = {"use_orig_params": options.originals == "yes", "device_id": torch.device("cpu")}
    model[2] = FullyShardedDataParallel(model[2], **keys)
    model = FullyShardedDataParallel(model, **keys)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
inputs, labels = torch.randn(BATCH * STEPS, 5), torch.randint(0, 3, (BATCH * STEPS,))
data = TensorDataset(inputs[rank::ranks], labels[rank::ranks])
for samples, targets in DataLoader(data, batch_size=BATCH // ranks):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(samples), targets).backward()
    optimizer.step()
if ranks > 1:
    dist.destroy_process_group()
