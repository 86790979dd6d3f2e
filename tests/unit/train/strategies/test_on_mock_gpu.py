"""Training on a device that is not the CPU: see tests/support/mock_gpu.py."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.support.checkpoints import read_checkpoint, save_part
from tests.support.mock_gpu import COMPILE_LIMIT_S, NAME
from tests.support.trials import changed, rank_context
from tests.unit.train.strategies import own_models
from tests.unit.train.strategies.own_models import resnet_trial
from tests.unit.train.strategies.own_training import (
    RESNET_SIZES,
    SIZES,
    TOLERANCE,
    TRIALS,
    assert_normalised_equivalently,
    train,
    train_by_hand,
    trial_of,
    with_options,
)
from tests.unit.train.strategies.pipeline.node import (
    LIMIT_S,
    ThreadPeers,
    batch_of,
    copied,
    distance,
    layers_of,
    model_of,
    task_for,
)

from paceline.collectives import buffers, gloo_group
from paceline.train.data.batches import Batch
from paceline.train.rank.evaluation import EvaluationModel
from paceline.train.strategies import create_strategy
from paceline.train.strategies.pipeline import partition
from paceline.train.training import passes
from paceline.train.training.checkpointing import checkpoint_activations
from paceline.train.training.devices import use_device
from paceline.train.transports.bucket_settings import CompressionSettings, GradientOptions

pytestmark = [pytest.mark.needs("mock-gpu"), pytest.mark.timeout(COMPILE_LIMIT_S + 100)]

MODELS = own_models.__name__


def on_gpu(trial):
    return trial.model_copy(update={"device": "cuda"})


def compare(trial):
    """Run by the process with the device: train there, and with torch alone on the CPU."""
    gradients, weights = train_by_hand(trial, SIZES)
    for of_rank, found in train(on_gpu(trial), SIZES):
        assert distance({n: found[n] for n in weights}, weights) < TOLERANCE
        if trial.placement.stages == 1:
            assert distance({n: of_rank[n] for n in gradients}, gradients) < TOLERANCE


@pytest.mark.parametrize("name", ["sequential", "pipeline-2", "hybrid-2x2"])
def test_training_is_that_of_the_cpu(mock_gpu, name):
    mock_gpu.run(compare, trial_of(**TRIALS[name]))


def test_recomputed_blocks_use_the_buffers_of_the_model(mock_gpu):
    task = f"{MODELS}:Scaled"
    trial = trial_of(**TRIALS["sequential"], task=task, activation_checkpointing=True)
    mock_gpu.run(compare, trial)


def test_stages_publish_buffers_that_the_model_uses_itself(mock_gpu):
    trial = trial_of(**TRIALS["pipeline-2"], task=f"{MODELS}:Scaled")
    mock_gpu.run(compare, with_options(trial, balance="time"))


def most_blocks_on_device(trial):
    """Return how many blocks have parameters on the device at once while they are timed."""
    blocks, counts = [], []

    class Watched(partition._Block):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            blocks.append(self.module)

        def forward(self, inputs, *, first):
            counts.append(sum(map(is_on_device, blocks)))
            return super().forward(inputs, first=first)

    task, layers = layers_of(trial)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "_Block", Watched)
        partition.profile_layers(
            task, layers, trial.training, samples=2, micro_batches=2, replicas=1,
            device=torch.device(NAME, 0),
        )  # fmt: skip
    assert not any(map(is_on_device, blocks))
    return max(counts)


def is_on_device(module):
    return any(parameter.device.type == NAME for parameter in module.parameters())


def test_blocks_are_timed_one_by_one_because_all_may_not_fit(mock_gpu):
    assert mock_gpu.run(most_blocks_on_device, trial_of(**TRIALS["pipeline-2"])) == 1


def types_of_activations(trial, device):
    task, layers = layers_of(trial)
    found = partition.trace(task, layers, trial.training, torch.device(device, 0))
    return [str(activation.dtype) for activation in found]


def test_activations_have_the_types_of_the_devices_autocast(mock_gpu):
    trial = trial_of(**TRIALS["pipeline-2"], task=f"{MODELS}:LayerNormed", precision="bf16")
    on_device = mock_gpu.run(types_of_activations, trial, NAME)
    assert on_device == ["torch.float32", "torch.bfloat16", "torch.float32", "torch.bfloat16"]
    assert types_of_activations(trial, "cpu")[2] == "torch.bfloat16"


def compare_normalised(name):
    gradients, weights = train_by_hand(resnet_trial("sequential"), RESNET_SIZES)
    ranks = train(on_gpu(resnet_trial(name)), RESNET_SIZES)
    assert_normalised_equivalently(ranks, gradients, weights)


@pytest.mark.parametrize("name", ["sequential", "pipeline-2", "hybrid-2x2"])
def test_batch_norm_over_the_global_batch_is_that_of_the_cpu(mock_gpu, name):
    mock_gpu.run(compare_normalised, name)


def settings_on_device(trial):
    reported = use_device(torch.device(NAME, 0), trial.training)
    cudnn = torch.backends.cudnn
    return reported, (cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark)


@pytest.mark.parametrize(
    ("training", "tf32", "autotuning"),
    [
        ({}, False, False),
        ({"float32_matmul_precision": "high", "cudnn_autotuning": True}, True, True),
    ],
)
def test_tf32_and_autotuning_are_chosen_and_recorded(mock_gpu, training, tf32, autotuning):
    trial = trial_of(**TRIALS["sequential"], **training)
    reported, settings = mock_gpu.run(settings_on_device, trial)
    assert settings == (tf32, not autotuning, autotuning)
    assert reported["tf32"] == tf32
    assert reported["cudnn_deterministic"] == (not autotuning)
    assert reported["device"] == f"{NAME}:0 (memory of the host)"


def train_rank(rank, trial, sizes, folder):
    """Train one rank. On the device, collectives take its tensors only."""
    from tests.support import mock_nccl

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = trial.placement.ranks_per_node
    store = dist.FileStore(str(Path(folder, f"store-{trial.device}")), ranks)
    backend = gloo_group.BACKEND if trial.device == "cpu" else mock_nccl.BACKEND
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    try:
        strategy, context = create_strategy(trial), rank_context(rank, ranks)
        model = model_of(trial)
        checkpoint_activations(task_for(trial), model, trial)
        peers = ThreadPeers(dist.HashStore(), 0, 1)
        strategy.prepare(task_for(trial), model, context, trial, peers)
        gradients = {}
        for step, samples in enumerate(sizes):
            strategy.gradient(passes.share_of(batch_of(trial, step, samples), rank, ranks))
            gradients = copied(strategy.gradients())
            strategy.step()
        weights = copied(strategy.state_dict())
        strategy.close(failed=False)
    finally:
        dist.destroy_process_group()
    as_numpy = [{n: t.numpy() for n, t in tensors.items()} for tensors in (gradients, weights)]
    return tuple(as_numpy)


def train_ranks(mock_gpu, trial, sizes, tmp_path):
    """Return gradients and weights of each rank."""
    found = mock_gpu.run_ranks(train_rank, trial, sizes, tmp_path)
    return [
        tuple({n: torch.from_numpy(t) for n, t in tensors.items()} for tensors in rank)
        for rank in found
    ]


def flat(trial):
    """Sum in a process group, as on GPUs, instead of shared memory."""
    return trial.model_copy(update={"transport": "nccl"})


def test_processes_train_as_on_the_cpu(mock_gpu, tmp_path):
    trial = flat(trial_of(**TRIALS["processes-2"]))
    gradients, weights = train_by_hand(trial, SIZES)
    for of_rank, found in train_ranks(mock_gpu, on_gpu(trial), SIZES, tmp_path):
        assert distance({n: found[n] for n in weights}, weights) < TOLERANCE
        assert distance({n: of_rank[n] for n in gradients}, gradients) < TOLERANCE


def test_processes_sum_batch_statistics_on_their_devices(mock_gpu, tmp_path):
    """NCCL refuses vectors of the host; and CUDA has no gradient of statistics that it did not
    save."""
    gradients, weights = train_by_hand(resnet_trial("sequential"), RESNET_SIZES)
    trial = on_gpu(flat(resnet_trial("processes-2")))
    ranks = train_ranks(mock_gpu, trial, RESNET_SIZES, tmp_path)
    assert_normalised_equivalently(ranks, gradients, weights)


def test_local_sgd_trains_as_on_the_cpu(mock_gpu, tmp_path):
    trial = changed(flat(trial_of(**TRIALS["processes-2"])), averaging={"period_steps": 2})
    on_cpu = train_ranks(mock_gpu, trial, [8, 7, 8, 8], tmp_path)
    on_device = train_ranks(mock_gpu, on_gpu(trial), [8, 7, 8, 8], tmp_path)
    for (_, found), (_, wanted) in zip(on_device, on_cpu, strict=True):
        assert distance(found, wanted) < TOLERANCE


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ("bf16", {}),
        ("fp16", {}),
        ("powersgd", {"rank": 2}),
        ("topk", {"density": 0.1}),
        ("terngrad", {}),
        ("int8", {}),
    ],
)
def test_compressed_gradients_are_those_of_the_cpu(mock_gpu, tmp_path, method, numbers):
    trial = flat(trial_of(**TRIALS["processes-2"]))
    compression = CompressionSettings(method=method, numbers=numbers)
    options = GradientOptions(compression=compression, buckets_in_flight=1)
    trial = trial.model_copy(update={"transport_options": options})
    on_cpu = train_ranks(mock_gpu, trial, SIZES[:2], tmp_path)
    on_device = train_ranks(mock_gpu, on_gpu(trial), SIZES[:2], tmp_path)
    for (_, found), (_, wanted) in zip(on_device, on_cpu, strict=True):
        assert distance(found, wanted) < TOLERANCE


def copied_through_the_host():
    """Send a tensor of the device as transports do that know memory of the host only."""
    tensor = torch.arange(6.0).view(2, 3).to(torch.device(NAME, 1)).t()
    wait_for_inputs = buffers.device_wait([tensor])
    wait_for_inputs()
    flat = buffers.wire_buffer(tensor)
    buffers.array_of(flat)[:] *= 2
    buffers.copy_back(flat, tensor)
    return flat.device.type, tensor.tolist()


def test_transports_of_the_host_copy_a_tensor_of_the_device(mock_gpu):
    found = mock_gpu.run(copied_through_the_host)
    assert found == ("cpu", [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]])


def evaluated(trial, device):
    """Return sums and counts of the metrics for some samples."""
    model = model_of(trial)
    weights = copied(model.state_dict())
    evaluation = EvaluationModel(task_for(trial), model, trial.training, torch.device(device, 0))
    random = np.random.default_rng(4)
    images = random.integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)
    batch = Batch(0, 0, np.arange(7), images, random.integers(0, 3, 7))
    sums = evaluation.sums(weights, [batch])
    return {name: [part.tolist() for part in parts] for name, parts in sums.items()}


def test_evaluation_gives_the_values_of_the_cpu(mock_gpu):
    trial = resnet_trial("sequential")
    found, wanted = mock_gpu.run(evaluated, trial, NAME), evaluated(trial, "cpu")
    assert found.keys() == wanted.keys()
    for name, parts in found.items():
        for of_device, of_cpu in zip(parts, wanted[name], strict=True):
            assert of_device == pytest.approx(of_cpu, rel=1e-5)


def save_and_restore(trial, folder):
    """Save the state after the second step, and restore it after the last one."""
    ranks = trial.placement.ranks_per_node
    before, saved = {}, threading.Barrier(ranks)

    def after_step(strategy, context, _peers, step):
        if step == 1:
            save_part(folder, strategy.rank_state(), context.rank, ranks, steps=2)
            before[context.rank] = copied(strategy.state_dict())
            saved.wait(LIMIT_S)
        elif step == len(SIZES) - 1:
            assert distance(copied(strategy.state_dict()), before[context.rank]) > 0
            strategy.restore(read_checkpoint(folder))
            assert distance(copied(strategy.state_dict()), before[context.rank]) == 0

    train(on_gpu(trial), SIZES, after_step=after_step)


@pytest.mark.parametrize("name", ["sequential", "hybrid-2x2"])
def test_state_is_saved_and_restored(mock_gpu, tmp_path, name):
    mock_gpu.run(save_and_restore, trial_of(**TRIALS[name]), tmp_path)
