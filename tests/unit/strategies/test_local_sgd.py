"""Local SGD of one rank in this process; with peers see tests/contract/test_compression.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from tests.support.trials import changed

from paceline.strategies import TrainBatch, create_strategy, local_sgd
from paceline.workloads.build import build_model, make_task, task_of


def batch_of(*, is_last):
    return TrainBatch(
        step=0, epoch=0, inputs=torch.randn(4, 3, 32, 32), targets=torch.arange(4) % 3,
        sample_ids=np.arange(4), global_samples=4, is_last=is_last,
    )  # fmt: skip


def test_rank_without_peers_trains_as_a_sequential_one(make_trial, solo):
    batch = batch_of(is_last=True)
    weights = []
    for averaging in (None, {"period_steps": 2}):
        trial = changed(make_trial(), local_strategy="processes", averaging=averaging)
        strategy = create_strategy(trial)
        model = build_model(make_task("tiny", classes=3, dropout=False, seed=3))
        strategy.prepare(task_of(trial.training, classes=3), model, solo, trial, None)
        result = strategy.gradient(batch)
        assert result.comm_s is None
        assert strategy.step() is None
        weights.append(strategy.state_dict())
        strategy.close(failed=False)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_bytes_per_step_do_not_count_the_steps_before_a_restart(
    make_trial, context_of, monkeypatch
):
    monkeypatch.setattr(local_sgd, "all_reduce_tensors", lambda _: None)
    averaging = {"period_steps": 2}
    trial = changed(make_trial(ranks=2), local_strategy="processes", averaging=averaging)
    sent = []
    for restored_steps in (0, 100):
        strategy = create_strategy(trial)
        model = build_model(make_task("tiny", classes=3, dropout=True, seed=3))
        strategy.prepare(task_of(trial.training, classes=3), model, context_of(0, 2), trial, None)
        monkeypatch.setattr(strategy._replica, "restore", lambda _: None)
        strategy.restore(SimpleNamespace(steps=restored_steps, of_replica=lambda *_: None))
        assert "sent_bytes_per_step" not in strategy.describe()
        for _ in range(4):
            strategy.gradient(batch_of(is_last=False))
            strategy.step()
        sent.append(strategy.describe()["sent_bytes_per_step"])
    assert sent[0] == sent[1] > 0


def test_weights_are_averaged_after_each_period_and_after_the_last_step(
    make_trial, context_of, monkeypatch
):
    averaged_after = []
    trial = changed(make_trial(ranks=2), local_strategy="processes", averaging={"period_steps": 2})
    strategy = create_strategy(trial)
    model = build_model(make_task("tiny", classes=3, dropout=False, seed=3))
    strategy.prepare(task_of(trial.training, classes=3), model, context_of(0, 2), trial, None)
    for step in range(5):
        monkeypatch.setattr(
            local_sgd, "all_reduce_tensors", lambda _, step=step: averaged_after.append(step)
        )
        strategy.gradient(batch_of(is_last=step == 4))
        strategy.step()
    assert averaged_after == [1, 3, 4]
