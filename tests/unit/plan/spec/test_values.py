"""Values of a spec: rates of links, and the learning rate of a training."""

from __future__ import annotations

import pytest
import torch

from paceline.base.errors import UsageError
from paceline.plan.spec.loading import check_spec
from paceline.plan.spec.values import bits_per_s, is_remote, scaled_learning_rate, warmup_factor
from paceline.plan.trials.planning import plan_trials
from paceline.train.training.optimizers import TaskOptimizer
from paceline.train.training.task import Task, TaskSettings


def planned(*trials, **training):
    sequential = {"launcher": "local", "local_strategy": "sequential"}
    document = {
        "schema": 2,
        "name": "rates",
        "training": {"max_steps": 9, "learning_rate": 0.1, "global_batch": 128, **training},
        "workloads": [{"name": "tiny"}],
        "trials": [sequential, *trials],
    }
    return [t.training for t in plan_trials(check_spec(document, "spec"), {"tiny": "/d"}, 4)]


@pytest.mark.parametrize(("scaling", "rate"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_rate_of_four_times_the_reference_batch(scaling, rate):
    assert scaled_learning_rate(0.1, scaling, 128, 32) == pytest.approx(rate)
    (training, *_) = planned(learning_rate_scaling=scaling)  # the batch of tiny is 32
    assert training.learning_rate == pytest.approx(rate)


def test_reference_batch_replaces_the_workloads_own_and_ranks_do_not_matter():
    ranks = {"launcher": "local", "local_strategy": "processes", "ranks_per_node": 4}
    found = planned(ranks, learning_rate_scaling="linear", reference_batch=64)
    assert {training.learning_rate for training in found} == {0.2}


def test_reference_batch_without_scaling_is_refused():
    with pytest.raises(UsageError, match="reference_batch has no effect without scaling"):
        planned(reference_batch=64)


def test_rounds_of_tasks_refuse_a_warm_up():
    rounds = {"launcher": "spark", "local_strategy": "processes", "transport": "spark-rounds"}
    with pytest.raises(UsageError, match="learning_rate_warmup_steps: transport"):
        planned(rounds, learning_rate_warmup_steps=2)


def test_factor_grows_linearly_to_one():
    assert [warmup_factor(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmup_factor(0, 0) == 1.0


class HalvedEachStep(Task):
    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_warm_up_multiplies_the_rates_of_the_schedule():
    settings = TaskSettings(learning_rate=8.0, momentum=0.0, learning_rate_warmup_steps=2)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = TaskOptimizer(HalvedEachStep(settings), [("p", parameter)])
    moved = []
    for _ in range(3):
        before = parameter.item()
        parameter.grad = torch.ones(1)
        optimizer.step()
        moved.append(before - parameter.item())
    assert moved == [8 / 2, 4.0, 2.0]


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ("64000bit", 64e3), ("64kbit", 64e3), ("100mbit", 1e8), ("2.5gbit", 2.5e9),
        ("1gbps", 1e9), ("1Gbit/s", 1e9), ("10 gbit", 1e10), ("100 Mb/s", 1e8),
    ],
)  # fmt: skip
def test_rates_of_links_are_read_in_common_spellings(rate, expected):
    assert bits_per_s(rate) == expected


@pytest.mark.parametrize("rate", ["63kbit", "fast", "1 gigabyte"])
def test_rate_of_no_link_is_refused(rate):
    with pytest.raises(UsageError, match=f"bandwidth: .* at least 64kbit, got '{rate}'"):
        bits_per_s(rate)


def test_only_urls_with_a_known_scheme_are_remote():
    names = ("s3://bucket/x", "hdfs://host/x", "file:///x", "https://host/x", "hdfs", "/s3/x")
    assert [is_remote(name) for name in names] == [True, True, False, False, False, False]
