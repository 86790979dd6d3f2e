"""A user's task is trained by every strategy as by torch alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tests.unit.strategies.pipeline.node import (
    CLASSES,
    Board,
    BoardPeers,
    batch_of,
    context_of,
    copied,
    distance,
    pipeline_trial,
)
from torch import nn

from paceline.analysis.tolerances import tolerance
from paceline.errors import RankFailed, UsageError
from paceline.plan.trial import Placement
from paceline.strategies import create_strategy
from paceline.strategies.reduction.optimizer_shard import OptimizerShard
from paceline.training import passes
from paceline.training.checkpointing import checkpoint_activations
from paceline.training.dropout import set_sample_keys
from paceline.training.task import Task
from paceline.training.tensors import sha256_of
from paceline.workloads.build import build_model, task_of

TASK = Path(__file__).parents[3] / "examples" / "own-task" / "my_task.py"
SIZES = [8, 8, 3, 1]
# The batch normalisation of a single vector is not defined. Of three replicas one has no sample.
RESNET_SIZES = [8, 7, 2]
# Float32 sums in another order; Adam divides by the gradients' own size, which enlarges relative
# differences of small ones.
TOLERANCE = 2e-4


def trial_of(strategy, ranks=1, replicas=1, stages=1, task=f"{TASK}:MyTask", **training):
    """A trial of a strategy on one node; 2 micro-batches where it has stages."""
    values = {"dropout": True, "task": task, "epochs": 1, **training}
    base = pipeline_trial(2, 2, **values)
    rows = base.model_dump() | {
        "local_strategy": strategy,
        "transport": "shared" if ranks > 1 else "none",
        "strategy_options": base.strategy_options.model_dump() if stages > 1 else {},
        "placement": Placement(
            nodes=1,
            ranks_per_node=ranks,
            threads_per_rank=replicas if strategy == "threads" else 1,
            replicas_per_node=replicas,
            stages=stages,
            oversubscribe=True,
        ).model_dump(),
    }
    return type(base).model_validate(rows)


TRIALS = {
    "sequential": {"strategy": "sequential"},
    "threads-2": {"strategy": "threads", "replicas": 2},
    "threads-3": {"strategy": "threads", "replicas": 3},
    "processes-2": {"strategy": "processes", "ranks": 2, "replicas": 2},
    "processes-3": {"strategy": "processes", "ranks": 3, "replicas": 3},
    "pipeline-2": {"strategy": "pipeline", "ranks": 2, "stages": 2},
    "hybrid-2x2": {"strategy": "hybrid", "ranks": 4, "replicas": 2, "stages": 2},
}


def task_for(trial):
    return task_of(trial.training, classes=CLASSES, steps=len(SIZES))


def train(trial, sizes=SIZES, make_batch=batch_of, after_step=lambda *_: None, results=None):
    """Weights after a step of each size, on every rank; ranks are threads of this process.

    after_step: called with strategy, context, peers and step. results: list to which the results
    of all ranks are added."""
    ranks, board = trial.placement.ranks_per_node, Board()
    models = [build_model(task_for(trial)) for _ in range(ranks)]  # torch's generator is shared
    for model in models:
        checkpoint_activations(task_for(trial), model, trial)

    def rank(local_rank):
        strategy = create_strategy(trial)
        try:
            context, peers = context_of(local_rank, ranks), BoardPeers(board, local_rank, ranks)
            strategy.prepare(task_for(trial), models[local_rank], context, trial, peers)
            for step, samples in enumerate(sizes):
                batch = make_batch(trial, step, samples)
                replica = local_rank // trial.placement.stages
                replicas = ranks // trial.placement.stages
                result = strategy.gradient(passes.share_of(batch, replica, replicas))
                if results is not None:
                    results.append(result)
                gradients = copied(strategy.gradients())
                strategy.step()
                after_step(strategy, context, peers, step)
            weights = copied(strategy.state_dict())
        except BaseException:
            strategy.close(failed=True)
            raise
        strategy.close(failed=False)
        return gradients, weights

    # models that torch.fx has to trace cannot be traced beside the passes of other ranks
    blocks = {id(m): task_for(trial).blocks(m) for m in models if trial.placement.stages > 1}
    traced = patch.object(type(task_for(trial)), "blocks", lambda _, model: blocks[id(model)])
    with traced, ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(rank, r) for r in range(ranks)]]


def train_by_hand(trial, sizes=SIZES, make_batch=batch_of):
    """The same with torch alone: clipping, schedule and all; the whole batch in one pass."""
    task = task_for(trial)
    model = build_model(task)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = task.optimizer(trained)
    schedule = task.schedule(optimizer)
    for step, samples in enumerate(sizes):
        batch = make_batch(trial, step, samples)
        set_sample_keys(model, trial.training.seed, batch.epoch, batch.sample_ids)
        optimizer.zero_grad()
        task.loss(model(batch.inputs), batch.targets).mean().backward()
        gradients = copied({name: p.grad for name, p in trained})
        if task.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return gradients, copied(model.state_dict())


class Block(nn.Module):
    """Attention and a feed-forward layer with tied weights."""

    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, bias=False)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x):
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(Task):
    """A small vision transformer: layers of sequences, and tied weights."""

    def model(self):
        return nn.Sequential(
            nn.Conv2d(3, 8, 8, stride=8),
            nn.Flatten(2),
            nn.Linear(16, 16),
            Block(16),
            nn.Flatten(1),
            nn.Linear(128, 16),
            nn.Tanh(),
            nn.Linear(16, self.settings.classes),
        )


class Tied(Task):
    """The first and the last linear layer share their weight, across the stages of a pipeline."""

    clip_norm = 0.5

    def model(self):
        model = nn.Sequential(
            nn.Conv2d(3, 4, 8, stride=8),
            nn.Flatten(1),
            nn.Linear(64, 16),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, 16, bias=False),
            nn.Tanh(),
            nn.Linear(16, 16),
            nn.Linear(16, self.settings.classes),
        )
        model[7].weight = model[3].weight
        return model


@pytest.mark.parametrize("name", [n for n in TRIALS if n != "sequential"])
def test_weights_that_stages_share_are_equivalent(name):
    trial = trial_of(**TRIALS[name], task=f"{__name__}:Tied")
    if hasattr(trial.strategy_options, "split_points"):
        options = trial.strategy_options.model_copy(update={"split_points": (5,), "balance": None})
        trial = trial.model_copy(update={"strategy_options": options})
    gradients, weights = train_by_hand(trial)
    ranks = train(trial)
    for _, found in ranks:
        assert distance(found, weights) < TOLERANCE
    assert distance(ranks[0][0], gradients) < TOLERANCE


WORDS, LENGTH = 11, 6


class Embedding(nn.Module):
    """Embeddings of tokens and positions."""

    def __init__(self, width):
        super().__init__()
        self.token = nn.Embedding(WORDS, width)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, width))

    def forward(self, tokens):
        return self.token(tokens) + self.position


class GPT(Task):
    """Predicts the next token; input and output share the embedding."""

    clip_norm = 1.0

    def model(self):
        embedding, head = Embedding(16), nn.Linear(16, WORDS, bias=False)
        head.weight = embedding.token.weight
        return nn.Sequential(embedding, Block(16), nn.Dropout(0.2), nn.LayerNorm(16), head)

    def loss(self, outputs, targets):
        predicted = outputs[:, :-1].transpose(1, 2)
        losses = nn.functional.cross_entropy(predicted, targets[:, 1:], reduction="none")
        return losses.mean(1)

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    def example_input(self):
        return torch.zeros(1, LENGTH, dtype=torch.long)


def tokens_of(trial, step, samples):
    generator = torch.Generator().manual_seed(50 + step)
    tokens = torch.randint(WORDS, (samples, LENGTH), generator=generator)
    return replace(batch_of(trial, step, samples), inputs=tokens, targets=tokens)


@pytest.mark.parametrize(
    ("name", "balance"),
    [
        *((name, "size") for name in TRIALS if name != "sequential"),
        ("pipeline-2", "time"),
        ("hybrid-2x2", "time"),
    ],
)
def test_small_gpt_on_tokens_is_equivalent(name, balance):
    trial = trial_of(**TRIALS[name], task=f"{__name__}:GPT")
    if hasattr(trial.strategy_options, "balance"):
        options = trial.strategy_options.model_copy(update={"balance": balance})
        trial = trial.model_copy(update={"strategy_options": options})
    gradients, weights = train_by_hand(trial, make_batch=tokens_of)
    ranks = train(trial, make_batch=tokens_of)
    for _, found in ranks:
        assert distance(found, weights) < TOLERANCE
    assert distance(ranks[0][0], gradients) < 10 * TOLERANCE


class Reordered(nn.Module):
    """Uses its layers in another order than it names them."""

    def __init__(self, classes):
        super().__init__()
        self.head = nn.Linear(8, classes)
        self.body = nn.Linear(64, 8)
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 8, stride=8), nn.Flatten(1))

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.stem(x))))


class Blocks(Task):
    """Names the blocks of a model that is no sequence."""

    def model(self):
        return Reordered(self.settings.classes)

    def blocks(self, model):
        names = ("stem", "body", "tanh", "head")
        return [(name, getattr(model, name, None) or nn.Tanh()) for name in names]


@pytest.mark.parametrize("name", ["pipeline-2", "hybrid-2x2"])
def test_blocks_in_another_order_than_the_parameters_are_equivalent(name):
    trial = trial_of(**TRIALS[name], task=f"{__name__}:Blocks")
    gradients, weights = train_by_hand(trial)
    for found_gradients, found in train(trial):
        assert found.keys() == weights.keys()
        assert distance({n: found[n] for n in weights}, weights) < TOLERANCE
        assert found_gradients.keys() == gradients.keys()


@pytest.mark.parametrize("name", [n for n in TRIALS if n != "sequential"])
def test_attention_layer_norm_and_tied_weights_are_equivalent(name):
    trial = trial_of(**TRIALS[name], task=f"{__name__}:Transformer")
    gradients, weights = train_by_hand(trial)
    ranks = train(trial)
    for _, found in ranks:
        assert distance(found, weights) < TOLERANCE
    assert distance(ranks[0][0], gradients) < TOLERANCE


class Residual(nn.Module):
    """Two convolutions with batch normalisation, and a shortcut."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.shortcut_norm = nn.BatchNorm2d(outputs, momentum=None)

    def forward(self, x):
        shortcut = self.shortcut_norm(self.shortcut(x))
        return torch.relu(self.norm(self.conv(x)) + shortcut)


class ResNet(Task):
    """A small residual network with batch normalisation."""

    def model(self):
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            Residual(4, 6),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(1),
            nn.Linear(24, 8),
            nn.BatchNorm1d(8, affine=False),
            nn.Linear(8, self.settings.classes),
        )


class FineTuned(Task):
    """The first layers and one weight in the middle are not trained."""

    clip_norm = 0.5

    def model(self):
        model = nn.Sequential(
            nn.Conv2d(3, 4, 8, stride=8),
            nn.Flatten(1),
            nn.Linear(64, 16),
            nn.Tanh(),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, self.settings.classes),
        )
        for name in ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight"):
            model.get_parameter(name).requires_grad = False
        return model

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def trials_by_split():
    """Return each trial, those with stages once for each place of the split."""
    for name, values in TRIALS.items():
        for split in (2, 4, 5) if "stages" in values else (None,):
            yield pytest.param(name, split, id=name if split is None else f"{name}-at-{split}")


@pytest.mark.parametrize(("name", "split"), list(trials_by_split()))
def test_parameters_that_are_not_trained_keep_their_values(name, split):
    trial = trial_of(**TRIALS[name], task=f"{__name__}:FineTuned")
    if split is not None:
        options = trial.strategy_options.model_copy(
            update={"split_points": (split,), "balance": None}
        )
        trial = trial.model_copy(update={"strategy_options": options})
    gradients, weights = train_by_hand(trial)
    initial = build_model(task_for(trial)).state_dict()
    ranks = train(trial)
    for _, found in ranks:
        assert list(found) == list(weights)
        assert distance(found, weights) < TOLERANCE
        assert torch.equal(found["2.weight"], initial["2.weight"])
        assert not torch.equal(found["4.bias"], initial["4.bias"])
    assert ranks[0][0].keys() == gradients.keys() == {"4.bias", "6.weight", "6.bias"}
    assert distance(ranks[0][0], gradients) < TOLERANCE


class PlainResNet(nn.Module):
    """A residual network that is no sequence, with dropout."""

    def __init__(self, classes):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4)
        self.residual = Residual(4, 6)
        self.hidden, self.dropout = nn.Linear(24, 8), nn.Dropout(0.3)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = self.residual(torch.relu_(self.norm(self.stem(x))))
        x = torch.flatten(nn.functional.adaptive_avg_pool2d(x, 2), 1)
        return self.head(self.dropout(torch.tanh(self.hidden(x))))


class PlainResNetTask(Task):
    def model(self):
        return PlainResNet(self.settings.classes)


class PlainGPT(nn.Module):
    """A language model that is no sequence; the head shares the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.block = Embedding(16), Block(16)
        self.dropout, self.norm = nn.Dropout(0.2), nn.LayerNorm(16)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.embedding.token.weight

    def forward(self, tokens):
        return self.head(self.norm(self.dropout(self.block(self.embedding(tokens)))))


class PlainGPTTask(GPT):
    def model(self):
        return PlainGPT()


@pytest.mark.parametrize("split", [1, 3, 6, 8])
@pytest.mark.parametrize("name", ["pipeline-2", "hybrid-2x2"])
def test_residual_network_without_blocks_is_split_equivalently(name, split):
    trial = trial_of(**TRIALS[name], task=f"{__name__}:PlainResNetTask")
    update = {"split_points": (split,), "balance": None, "micro_batches": 1}
    options = trial.strategy_options.model_copy(update=update)
    trial = trial.model_copy(update={"strategy_options": options})
    gradients, weights = train_by_hand(trial, RESNET_SIZES)
    ranks = train(trial, RESNET_SIZES)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for _, found in ranks:
        assert list(found) == list(weights)
        for key, tensor in weights.items():
            torch.testing.assert_close(found[key], tensor, rtol=TOLERANCE, atol=1e-6)
    for key, tensor in gradients.items():
        torch.testing.assert_close(ranks[0][0][key], tensor, rtol=1e-3, atol=1e-5 * float(largest))


@pytest.mark.parametrize("balance", ["size", "time"])
@pytest.mark.parametrize("name", ["pipeline-2", "hybrid-2x2"])
def test_tied_weights_of_a_model_without_blocks_are_equivalent(name, balance):
    trial = trial_of(**TRIALS[name], task=f"{__name__}:PlainGPTTask")
    options = trial.strategy_options.model_copy(update={"balance": balance})
    trial = trial.model_copy(update={"strategy_options": options})
    gradients, weights = train_by_hand(trial, make_batch=tokens_of)
    ranks = train(trial, make_batch=tokens_of)
    for _, found in ranks:
        assert distance(found, weights) < TOLERANCE
    found = {name: ranks[0][0][name] for name in gradients}  # in the order of use
    assert distance(found, gradients) < 10 * TOLERANCE


def resnet_trial(name, **training):
    trial = trial_of(**TRIALS[name], task=f"{__name__}:ResNet", **training)
    if not hasattr(trial.strategy_options, "micro_batches"):
        return trial
    options = trial.strategy_options.model_copy(update={"micro_batches": 1})
    return trial.model_copy(update={"strategy_options": options})


@pytest.fixture(scope="module")
def resnet_by_hand():
    return train_by_hand(resnet_trial("sequential"), RESNET_SIZES)


@pytest.mark.parametrize("name", TRIALS)
def test_batch_norm_over_the_global_batch_is_equivalent(name, resnet_by_hand):
    gradients, weights = resnet_by_hand
    trial, results = resnet_trial(name), []
    ranks = train(trial, RESNET_SIZES, results=results)
    # the statistics are communication, and of the stages of a pipeline some have no such layer
    measured = [result.pass_comm_s for result in results if result.pass_comm_s is not None]
    assert bool(measured) == (trial.placement.replicas > 1)
    assert all(seconds > 0 for seconds in measured)
    if measured and trial.placement.stages == 1:
        assert len(measured) == len(results)
    for _, found in ranks:
        assert list(found) == list(weights)
        for key, tensor in weights.items():
            torch.testing.assert_close(found[key], tensor, rtol=TOLERANCE, atol=1e-6)
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for key, tensor in gradients.items():
        torch.testing.assert_close(ranks[0][0][key], tensor, rtol=1e-3, atol=1e-5 * float(largest))


@pytest.mark.parametrize("name", ["threads-2", "processes-2", "hybrid-2x2"])
def test_batch_norm_of_each_replica_alone_is_found(name, resnet_by_hand, monkeypatch):
    for module in ("threads.strategy", "processes.strategy", "pipeline.stage"):
        monkeypatch.setattr(f"paceline.strategies.{module}.synchronise", lambda *_: None)
    # equal shares of at least two samples, so that every replica has statistics of its own
    found = train(resnet_trial(name), RESNET_SIZES[:1])
    gradients, _ = train_by_hand(resnet_trial("sequential"), RESNET_SIZES[:1])
    assert distance(found[0][0], gradients) > 0.1


def replicas_by_hand(trial, batch, replicas):
    """Gradients of the mean loss, and running statistics of each replica; own statistics each."""
    models = [build_model(task_for(trial)) for _ in range(replicas)]
    for replica, model in enumerate(models):
        share = passes.share_of(batch, replica, replicas)
        loss = task_for(trial).loss(model(share.inputs), share.targets).sum()
        (loss / batch.global_samples).backward()
    summed: dict[str, torch.Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            summed[name] = summed.get(name, torch.zeros(())) + parameter.grad
    return summed, [model.state_dict() for model in models]


@pytest.mark.parametrize("name", ["threads-2", "processes-2", "hybrid-2x2"])
def test_batch_norm_per_replica_uses_each_replicas_own_samples(name):
    trial = resnet_trial(name, batch_norm="per-replica")
    gradients, states = replicas_by_hand(trial, batch_of(trial, 0, 8), 2)
    ranks = train(trial, [8])
    largest = max(gradient.abs().max() for gradient in gradients.values())
    for key, tensor in gradients.items():
        torch.testing.assert_close(ranks[0][0][key], tensor, rtol=1e-3, atol=1e-5 * float(largest))
    assert trial.inexact_reasons == [
        "each replica normalises with the statistics of its own samples"
    ]
    running = "1.running_mean"
    torch.testing.assert_close(ranks[0][1][running], states[0][running])
    if name == "processes-2":
        torch.testing.assert_close(ranks[1][1][running], states[1][running])


class Normalised(Task):
    """Batch normalisation of images only, which is defined for a single one, too."""

    def model(self):
        return nn.Sequential(
            nn.Conv2d(3, 4, 8, stride=8),
            nn.BatchNorm2d(4),
            nn.Flatten(1),
            nn.Linear(64, self.settings.classes),
        )


@pytest.mark.parametrize("name", ["threads-3", "processes-3"])
def test_replica_without_samples_changes_no_statistics_of_its_own(name):
    trial = trial_of(**TRIALS[name], task=f"{__name__}:Normalised", batch_norm="per-replica")
    ranks = train(trial, [9, 2])
    for _, weights in ranks:
        assert all(tensor.isfinite().all() for tensor in weights.values())
    if name == "processes-3":
        assert [int(weights["1.num_batches_tracked"]) for _, weights in ranks] == [2, 2, 1]


def test_single_vector_of_a_replica_is_refused_with_what_to_do():
    with pytest.raises(RankFailed, match=r"one sample of this step.*batch_norm = \"global\""):
        train(resnet_trial("threads-2", batch_norm="per-replica"), [2])


def test_batch_norm_of_micro_batches_is_refused_with_the_layer():
    with pytest.raises(UsageError, match=r"layer 1 normalises .* expected 1, got 2"):
        train(trial_of(**TRIALS["pipeline-2"], task=f"{__name__}:ResNet"))


@pytest.fixture(scope="module")
def by_hand():
    return train_by_hand(trial_of("sequential"))


@pytest.mark.parametrize("name", TRIALS)
def test_own_optimizer_schedule_loss_clipping_and_accumulation_are_equivalent(name, by_hand):
    found = train(trial_of(**TRIALS[name]))
    for _, weights in found:
        assert distance(weights, by_hand[1]) < TOLERANCE
    assert distance(found[0][0], by_hand[0]) < 10 * TOLERANCE
    assert len({sha256_of(weights) for _, weights in found}) == 1


def update_difference(trial, found, wanted):
    """The largest difference of a tensor, relative to how far training moved it."""
    initial = build_model(task_for(trial)).state_dict()
    return max(
        float((found[n] - wanted[n]).norm() / (wanted[n] - initial[n]).norm()) for n in wanted
    )


def step_the_schedule_twice(monkeypatch):
    """On the worker that owns the first parameter."""
    step = OptimizerShard.step

    def twice(self, squared_norm=None):
        step(self, squared_norm)
        if self.parameter_shards[0].offset == 0:
            self._optimizer._schedule.step()

    monkeypatch.setattr(OptimizerShard, "step", twice)


def sum_tied_weights_twice(monkeypatch):
    """Double the gradient of the tied weight, as a reducer does that adds it once per layer."""
    reduce = OptimizerShard.reduce

    def doubled(self, own, others, factors=()):
        reduce(self, own, others, factors)
        for shard, parameter in zip(self.parameter_shards, self._parameters, strict=True):
            if shard.name == "3.up.weight":
                parameter.grad.mul_(2)

    monkeypatch.setattr(OptimizerShard, "reduce", doubled)


def see_a_sample_twice(monkeypatch):
    """The second replica trains on the last sample of the first one, too."""
    bounds = passes.share_bounds

    def overlapping(samples, replica, replicas):
        low, high = bounds(samples, replica, replicas)
        return (low - 1, high) if replica == 1 and replicas == 2 else (low, high)

    monkeypatch.setattr(passes, "share_bounds", overlapping)


@pytest.mark.parametrize(
    ("fault", "task"),
    [
        (None, f"{TASK}:MyTask"),
        (step_the_schedule_twice, f"{TASK}:MyTask"),
        (see_a_sample_twice, f"{TASK}:MyTask"),
        (None, f"{__name__}:Transformer"),
        (sum_tied_weights_twice, f"{__name__}:Transformer"),
    ],
)
def test_faults_in_the_parts_of_a_task_are_not_equivalent(fault, task, monkeypatch):
    trial = trial_of(**TRIALS["threads-2"], task=task)
    _, wanted = train_by_hand(trial)
    if fault is not None:
        fault(monkeypatch)
    ((_, found),) = train(trial)
    limit = tolerance("fp32", "fp32", len(SIZES)).weights
    difference = update_difference(trial, found, wanted)
    assert difference < limit / 10 if fault is None else difference > limit
