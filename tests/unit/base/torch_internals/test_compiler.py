"""torch's compiler is imported by trainings that use it, and by no other."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import sys, torch
import torch.distributed as dist
from paceline.base.torch_internals import compiler
from paceline.train.training import tensors
compiler.import_when_used()
def is_imported(): return "torch._dynamo.convert_frame" in sys.modules
model = torch.nn.Linear(2, 2)
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())]
def step():
    for optimizer in optimizers:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
step()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
replica(torch.ones(1, 2)).sum().backward()
del replica
dist.destroy_process_group()

mode = tensors.fake_mode()
fake = tensors.as_fake(mode, torch.ones(3, 2))
assert tensors.call_fake(mode, model, fake).shape == (3, 2)

torch._dynamo.config.recompile_limit = 5
assert not is_imported()
"""
USES = {
    "compiled model": """
with torch.no_grad():
    expected = model(torch.ones(1, 2))
    assert torch.equal(torch.compile(model, backend="eager")(torch.ones(1, 2)), expected)
""",
    "module of the compiler": """
from torch._dynamo.source import AttrSource
import torch._dynamo.variables.builder
assert torch._dynamo.variables.builder.AttrSource is AttrSource
""",
    "activation checkpoint": """
from torch.utils.checkpoint import checkpoint
checkpoint(model, torch.ones(1, 2), use_reentrant=False).sum().backward()
import torch._dynamo.convert_frame  # with torch 2.9 the line above does not need it yet
""",
}
END = """
assert is_imported() and torch._dynamo is sys.modules["torch._dynamo"]
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
from torch._dynamo import config
assert torch._dynamo.config is config is sys.modules["torch._dynamo.config"]
assert torch._dynamo.utils.config is config and config.recompile_limit == 5
step()
"""


@pytest.mark.parametrize("use", USES)
def test_is_imported_when_used(use: str) -> None:
    subprocess.run([sys.executable, "-c", BEGIN + USES[use] + END], check=True, timeout=120)
