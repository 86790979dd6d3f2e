"""Tasks that are no sequences of layers, or have their own optimiser, suit every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.train.workloads.build import build_model, make_task
from paceline.train.workloads.facts import derive_facts

EXAMPLES = Path(__file__).parents[4] / "examples"
GPT = {"vocabulary": 32, "length": 24, "width": 32, "blocks": 3}


@pytest.mark.parametrize(
    "path",
    ["paceline.train.workloads.gpt:GPT", f"{EXAMPLES}/own-task/my_task.py:MyTask"],
)
def test_every_strategy_can_train_it(path):
    facts = derive_facts(path, samples=16)
    assert (facts.splitting_fault, facts.sharding_fault) == (None, None)
    assert facts.optimizer == "AdamW"
    assert len(facts.split_points) >= 4


def test_language_model_is_split_between_its_blocks():
    task = make_task("gpt-small", options=GPT, samples=16, input_shape=(25,), input_dtype="int64")
    model = build_model(task)
    blocks = task.blocks(model)
    assert [name for name, _ in blocks] == [
        "token", "add", "dropout", "blocks.0", "blocks.1", "blocks.2", "norm", "head",
    ]  # fmt: skip
    samples = task.dataset()
    assert samples is not None
    tokens = task.to_input(samples[5][0][None])
    units = tokens
    model.eval()
    for _, block in blocks:
        units = block(units)
    assert torch.equal(units, model(tokens))
