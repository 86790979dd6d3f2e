"""An evaluation gives the values of the plain model, whatever the strategy."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.support.fabricated_samples import IMAGES, LABELS, FakeFeed
from tests.unit.train.strategies.own_models import resnet_trial
from tests.unit.train.strategies.own_training import RESNET_SIZES, TRIALS, train
from tests.unit.train.strategies.pipeline.node import task_for
from torch.nn.functional import cross_entropy

from paceline.base.errors import UsageError
from paceline.measure.records.rows import EvaluationRow
from paceline.measure.records.tables import rows as read_rows
from paceline.plan.spec.values import Target
from paceline.plan.trials.sample_order import SampleOrder
from paceline.plan.trials.trial import Evaluation
from paceline.train.rank.evaluation import EvaluationModel, Evaluator, metric_sums
from paceline.train.training.task import Task
from paceline.train.workloads.build import build_model

HELD_OUT = 7  # with four ranks some have two samples, and of two batches the last has three
ORDER = SampleOrder([20], seed=1, global_batch=4, epochs=9, held_out_samples=HELD_OUT)


def evaluation(**changes):
    values = {"held_out_samples": HELD_OUT, "split_seed": 0, "every_steps": 2, "every_epochs": None}
    return Evaluation(**{**values, **changes})


def evaluator(trial, context, rows, **changes):
    training = trial.training.model_copy(update={"evaluation": evaluation(**changes)})
    task = task_for(trial)
    return Evaluator(
        trial.model_copy(update={"training": training}), task, build_model(task), ORDER, context,
        lambda: FakeFeed(ORDER.held_out(), rank=context.rank, world_size=context.world_size), rows,
    )  # fmt: skip


def metrics_of(files):
    """Values by number of steps and metric, from the rows of all ranks."""
    sums = {}
    for row in (row for file in files for row in read_rows(file, EvaluationRow)):
        total = sums.setdefault((row.steps, row.metric), [0.0, 0.0])
        total[0] += row.sums[0]
        total[1] += row.counts[0]
    assert {count for _, count in sums.values()} == {HELD_OUT}
    return {key: total / count for key, (total, count) in sums.items()}


def evaluated(trial, folder, sizes=RESNET_SIZES, **changes):
    """The metrics of a training, evaluated after its second and its third step."""
    ranks = trial.placement.ranks_per_node
    one_at_a_time = threading.Lock()  # torch's generator belongs to the process
    own = {}

    def after_step(strategy, context, peers, step):
        with one_at_a_time:
            if context.rank not in own:
                file = folder / f"{context.rank}.jsonl"
                own[context.rank] = evaluator(trial, context, file, **changes)
        if step > 0:
            own[context.rank].run(strategy, step, 0, peers)

    train(trial, sizes, after_step=after_step)
    return metrics_of([folder / f"{rank}.jsonl" for rank in range(ranks)])


def value_by_hand(trial, weights):
    task = task_for(trial)
    model = build_model(task).eval()
    model.load_state_dict(weights)
    ids = np.concatenate([window.sample_ids for window in ORDER.held_out().windows(0)])
    with torch.no_grad():
        outputs = model(task.to_input(IMAGES[ids]))
    targets = torch.from_numpy(LABELS[ids])
    return {
        "loss": cross_entropy(outputs, targets).item(),
        "accuracy": (outputs.argmax(1) == targets).double().mean().item(),
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return evaluated(resnet_trial("sequential"), tmp_path_factory.mktemp("plain"))


def test_values_are_those_of_the_model_in_evaluation_mode(plain):
    trial = resnet_trial("sequential")
    for steps in (2, 3):
        ((_, weights),) = train(trial, RESNET_SIZES[:steps])
        for metric, value in value_by_hand(trial, weights).items():
            assert plain[steps, metric] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("name", [n for n in TRIALS if n != "sequential"])
def test_values_agree_under_every_strategy(name, plain, tmp_path):
    found = evaluated(resnet_trial(name), tmp_path)
    assert found.keys() == plain.keys()
    for key, value in plain.items():
        assert found[key] == pytest.approx(value, rel=1e-3), key


def test_evaluation_changes_no_weight(tmp_path):
    trial = resnet_trial("hybrid-2x2")
    plain = train(trial, RESNET_SIZES)[0][1]
    own = {}
    lock = threading.Lock()

    def after_step(strategy, context, peers, step):
        with lock:
            own.setdefault(context.rank, evaluator(trial, context, tmp_path / f"{context.rank}"))
        own[context.rank].run(strategy, step, 0, peers)

    found = train(trial, RESNET_SIZES, after_step=after_step)[0][1]
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())


def test_evaluations_use_all_threads_of_the_rank(tmp_path, monkeypatch):
    seen = []

    def sums(*_):
        seen.append(torch.get_num_threads())
        return {}

    trial = resnet_trial("threads-2")
    monkeypatch.setattr(EvaluationModel, "sums", sums)

    def after_step(strategy, context, peers, step):
        evaluator(trial, context, tmp_path / "rows.jsonl").run(strategy, step, 0, peers)
        seen.append(torch.get_num_threads())

    train(trial, RESNET_SIZES[:1], after_step=after_step)
    assert seen[1:] == [2, 1]  # after the check before the training


def test_stream_mode_reads_the_samples_again(tmp_path, solo, monkeypatch):
    opened = Mock(wraps=FakeFeed)
    monkeypatch.setitem(globals(), "FakeFeed", opened)
    trial = resnet_trial("sequential", reading="stream")
    made = evaluator(trial, solo, tmp_path / "rows.jsonl")
    train(trial, RESNET_SIZES[:2], after_step=lambda s, _, p, step: made.run(s, step, 0, p))
    assert opened.call_count == 3  # the check before the training, and two evaluations


def test_evaluations_are_due_by_steps_or_epochs_and_at_the_end():
    def due(steps, steps_per_epoch=4, **changes):
        found = evaluation(**changes)
        return [n + 1 for n in range(steps) if found.is_due(n, steps_per_epoch, steps)]

    assert due(7, every_steps=3) == [3, 6, 7]
    assert due(11, every_steps=None, every_epochs=2) == [8, 11]
    assert due(8, every_steps=None, every_epochs=1) == [4, 8]


def test_target_that_no_metric_has_is_refused_before_the_training(tmp_path, solo):
    trial = resnet_trial("sequential")
    with pytest.raises(UsageError, match=r"expected a metric of the task \(loss, accuracy\), got"):
        evaluator(trial, solo, tmp_path, target=Target(metric="accurracy", at_least=0.5))


class Pairs(Task):
    """Intersection and union of each of three classes."""

    def evaluate(self, outputs, targets):
        classes = torch.arange(3)
        predicted = outputs.argmax(1)[:, None] == classes
        actual = targets[:, None] == classes
        return {"iou": ((predicted & actual).sum(0), (predicted | actual).sum(0))}


def of(metric):
    """A task class whose only metric is this value."""
    return type("Mine", (Task,), {"evaluate": lambda *_: metric})


def sums_of(task_class, solo_trial):
    task = task_class(task_for(solo_trial).settings)
    outputs = torch.eye(3)[torch.tensor([0, 1, 1, 2])]
    return metric_sums(task, outputs, torch.tensor([0, 1, 2, 2]))


def test_pairs_are_summed_by_element():
    ((total, count),) = sums_of(Pairs, resnet_trial("sequential")).values()
    assert total.tolist() == [1, 1, 1]
    assert count.tolist() == [1, 2, 2]


@pytest.mark.parametrize(
    ("outputs", "targets", "metrics"),
    [
        (torch.eye(3), torch.tensor([0, 1, 1]), {"loss": 0, "accuracy": 2}),
        (torch.eye(3), torch.ones(3), {"loss": 0}),
        (torch.eye(3), torch.ones(3, 1, dtype=torch.int64), {"loss": 0}),
        (torch.ones(3, 4, 3), torch.tensor([0, 1, 1]), {"loss": 0}),
    ],
)
def test_default_has_accuracy_where_outputs_are_scores_and_targets_classes(
    outputs, targets, metrics
):
    class Free(Task):
        def loss(self, _, targets):
            return torch.zeros(len(targets))

    task = Free(task_for(resnet_trial("sequential")).settings)
    found = metric_sums(task, outputs, targets)
    assert {name: total.item() for name, (total, _) in found.items()} == metrics


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (None, r"Mine.evaluate: expected a dictionary with at least one metric, got None"),
        ({"f1": torch.ones(())}, r"evaluate\['f1'\]: .* shape \(4,\), .* got shape \(\)"),
        ({"f1": 0.5}, r"expected one value for each sample, or a sum and a count"),
        ({"f1": (torch.ones(2), torch.ones(3))}, r"a sum and a count of equal shape"),
    ],
)
def test_metric_of_another_form_is_refused_by_name(metric, message):
    with pytest.raises(UsageError, match=message):
        sums_of(of(metric), resnet_trial("sequential"))
