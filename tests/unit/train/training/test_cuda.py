"""Tests that need a GPU; skipped without one."""

from __future__ import annotations

import pytest
import torch
from tests.support.models import TINY_VGG
from tests.support.strategies import prepared, train_batch

from paceline.analysis.equivalence.tolerances import tolerance
from paceline.train.strategies import create_strategy
from paceline.train.training.devices import InputMover, Stopwatch, device_of, use_device
from paceline.train.training.tensors import sha256_of
from paceline.train.workloads.build import build_model, make_task, task_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

STEPS = 20


@pytest.fixture
def gpu(make_trial, solo):
    return device_of(on_gpu(make_trial()), solo)


def on_gpu(trial):
    return trial.model_copy(update={"device": "cuda"})


def trained(trial, context, model_name, steps):
    """First step's gradients, and weights after `steps` of a batch of 8, 7, 8, 7…"""
    strategy = create_strategy(trial)
    model = build_model(make_task(model_name, classes=3, dropout=trial.training.dropout, seed=3))
    strategy.prepare(task_of(trial.training, classes=3), model, context, trial, None)
    first = {}
    for step in range(steps):
        result = strategy.gradient(train_batch(8 - step % 2, step=step, global_samples=8))
        assert min(result.forward_s, result.backward_s) > 0
        if step == 0:
            first = {name: g.clone() for name, g in strategy.gradients().items()}
        strategy.step()
    return first, {name: w.clone() for name, w in strategy.state_dict().items()}


def norm(tensors):
    return float(torch.cat([t.double().flatten() for t in tensors.values()]).norm())


def difference(first, second):
    return {name: first[name] - second[name] for name in second}


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_batch_arrives_as_it_was_in_its_memory_format(gpu, memory_format):
    kept = getattr(
        torch, "channels_last" if memory_format == "channels_last" else "contiguous_format"
    )
    mover = InputMover(gpu)
    for step in range(20):  # pinned memory is used again while earlier copies are under way
        batch = torch.full((16, 3, 64, 64), float(step)).to(memory_format=kept)
        moved = mover.move(batch)
        assert moved.device == gpu
        assert moved.is_contiguous(memory_format=kept)
        assert bool((moved == step).all())


def test_stopwatch_sees_work_end_after_the_call_that_asked_for_it(gpu):
    watch = Stopwatch(gpu)
    matrix = torch.randn(4096, 4096, device=gpu)
    matrix @ matrix  # the first call loads the library
    started_s = watch.start()
    asked = watch.mark()
    for _ in range(20):
        matrix = matrix @ matrix / 64
    done = watch.mark()
    assert started_s <= watch.reached_s(asked) < watch.reached_s(done)
    assert watch.reached_s(done) > done.host_s


def test_float32_products_are_not_rounded_to_tf32(gpu, make_trial):
    use_device(gpu, make_trial().training)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    got = (left.to(gpu) @ right.to(gpu)).cpu().double()
    assert float((got - exact).abs().max()) < 1e-3  # TF32 gives about 0.05


@pytest.mark.parametrize("model_name", ["tiny-alexnet", TINY_VGG])
@pytest.mark.parametrize("dropout", [False, True])
def test_training_is_that_of_the_cpu(make_trial, solo, model_name, dropout):
    trial = make_trial(dropout=dropout)
    allowed = tolerance("fp32", "fp32", STEPS)
    wanted_gradient, wanted = trained(trial, solo, model_name, STEPS)
    gradient, weights = trained(on_gpu(trial), solo, model_name, STEPS)
    initial = build_model(make_task(model_name, classes=3, dropout=dropout, seed=3)).state_dict()
    off = norm(difference(gradient, wanted_gradient)) / norm(wanted_gradient)
    assert off < allowed.gradient
    assert norm(difference(weights, wanted)) / norm(difference(wanted, initial)) < allowed.weights
    sha256_of(weights)  # what is saved and compared is in the CPU's memory


def test_bf16_computes_in_bfloat16_on_the_gpu(make_trial, solo):
    exact, _ = trained(on_gpu(make_trial(dropout=False)), solo, "tiny-alexnet", 1)
    rough, _ = trained(on_gpu(make_trial(dropout=False, precision="bf16")), solo, "tiny-alexnet", 1)
    off = norm(difference(rough, exact)) / norm(exact)
    assert tolerance("fp32", "fp32", 1).gradient < off < tolerance("bf16", "fp32", 1).gradient


def test_empty_share_takes_part_with_no_weight(make_trial, solo):
    trial = on_gpu(make_trial())
    strategy = prepared(trial, solo)
    assert strategy.gradient(train_batch(0, global_samples=8)).loss_sum == 0.0
    assert not any(g.any() for g in strategy.gradients().values())
