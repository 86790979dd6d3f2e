"""The CPU, and what needs no GPU to be known of GPUs; with one see test_cuda.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline.base.errors import EnvironmentLacks
from paceline.train.training import devices
from paceline.train.training.devices import (
    InputMover,
    Stopwatch,
    device_name,
    device_of,
    on_cpu,
    synchronize,
    use_device,
)

CPU = torch.device("cpu")


@pytest.fixture
def cuda_trial(make_trial):
    def make(**changes):
        return make_trial(**changes).model_copy(update={"device": "cuda"})

    return make


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch say that it is built with CUDA and finds so many GPUs."""

    def pretend(count):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def test_trial_on_the_cpu_asks_for_no_gpu(make_trial, solo):
    assert device_of(make_trial(), solo) == CPU
    assert device_name(CPU) == "cpu"


@pytest.mark.parametrize(
    ("count", "oversubscribe", "indices"), [(4, False, [0, 1, 2]), (2, True, [0, 1, 0])]
)
def test_each_rank_has_a_gpu_of_its_own_or_shares_it_in_turn(
    cuda_trial, context_of, gpus, count, oversubscribe, indices
):
    gpus(count)
    trial = cuda_trial(ranks=3, oversubscribe=oversubscribe)
    got = [str(device_of(trial, context_of(rank, 3))) for rank in range(3)]
    assert got == [f"cuda:{index}" for index in indices]


def test_fewer_gpus_than_ranks_names_both_numbers(cuda_trial, context_of, gpus):
    gpus(2)
    trial = cuda_trial(ranks=3, oversubscribe=False)
    with pytest.raises(EnvironmentLacks, match="alpha: 3 ranks need as many GPUs, rank 1 sees 2;"):
        device_of(trial, context_of(1, 3))


@pytest.mark.parametrize("oversubscribe", [False, True])
def test_no_gpu_is_told_with_where_to_look(cuda_trial, solo, gpus, oversubscribe):
    gpus(0)
    with pytest.raises(EnvironmentLacks, match=r"finds none.*nvidia-smi.*CUDA_VISIBLE_DEVICES"):
        device_of(cuda_trial(oversubscribe=oversubscribe), solo)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built with CUDA")
def test_torch_without_cuda_is_told_with_what_to_install(cuda_trial, solo):
    with pytest.raises(EnvironmentLacks, match=r"torch .* built without; install .*CUDA build"):
        device_of(cuda_trial(), solo)


def test_cpu_needs_no_settings_and_no_waiting(make_trial):
    before = torch.backends.cudnn.allow_tf32
    assert use_device(CPU, make_trial().training) == {}
    assert torch.backends.cudnn.allow_tf32 == before
    synchronize(CPU)


def test_batch_for_the_cpu_is_not_copied():
    batch = torch.ones(2, 3)
    assert InputMover(CPU).move(batch) is batch


def test_tensors_on_the_cpu_are_handed_on_without_their_graph_and_without_a_copy():
    weight = torch.ones(2, requires_grad=True)
    got = on_cpu({"weight": weight})["weight"]
    assert not got.requires_grad
    assert got.data_ptr() == weight.data_ptr()


def test_stopwatch_on_the_cpu_is_the_program_s_clock(monkeypatch):
    moments = iter([1.0, 2.0, 3.5, 7.0])
    clock = SimpleNamespace(perf_counter=lambda: next(moments))
    monkeypatch.setattr(devices, "time", clock)
    watch = Stopwatch(CPU)
    assert watch.start() == 2.0
    first, second = watch.mark(), watch.mark()
    assert (watch.reached_s(second), watch.reached_s(first)) == (7.0, 3.5)
