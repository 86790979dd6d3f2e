"""The CPU, and what needs no GPU to be known of GPUs; with one see test_cuda.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline.errors import EnvironmentLacks
from paceline.training import devices
from paceline.training.devices import (
    DeviceClock,
    InputMover,
    Stopwatch,
    device_name,
    device_of,
    on_cpu,
    synchronize,
    unix_s,
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


def test_moment_in_seconds_since_the_epoch(monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: 50.0, time=lambda: 1_000_000.0)
    monkeypatch.setattr(devices, "time", clock)
    assert unix_s(47.5) == 999_997.5


class Streams:
    """Creates streams of a GPU; a stream is its name."""

    def __init__(self) -> None:
        self.highest = -3
        self.priorities: list[int] = []  # of the created ones

    def priority_range(self) -> tuple[int, int]:
        return 0, self.highest

    def __call__(self, _device: torch.device, *, priority: int) -> str:
        self.priorities.append(priority)
        return f"own {len(self.priorities)}"


class Gpu:
    """A device module whose streams reach an event when the test says so; milliseconds count."""

    def __init__(self) -> None:
        self.now_ms = 5.0  # of the GPU's own clock
        self.is_busy = self.is_full = False  # the current stream; all queues
        self.Stream = Streams()

    def current_stream(self, _device: torch.device) -> str:
        return "busy"

    def Event(self, *, enable_timing: bool) -> GpuEvent:  # noqa: N802  (name of torch)
        assert enable_timing
        return GpuEvent(self)


class GpuEvent:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.reached_ms: float | None = None

    def record(self, stream: str) -> None:
        self._is_current = stream == "busy"
        self.query()

    def query(self) -> bool:
        waits = self._gpu.is_full or (self._is_current and self._gpu.is_busy)
        if self.reached_ms is None and not waits:
            self.reached_ms = self._gpu.now_ms
        return self.reached_ms is not None

    def elapsed_time(self, later: GpuEvent) -> float:
        assert self.reached_ms is not None
        assert later.reached_ms is not None
        return later.reached_ms - self.reached_ms


@pytest.fixture
def gpu(monkeypatch):
    found = Gpu()
    monkeypatch.setattr(devices, "module_of", lambda _device: found)
    return found


@pytest.fixture
def host_s(monkeypatch):
    """The time of the host, in a list; each question takes 0.1 ms."""
    now_s = [100.0]

    def perf_counter():
        now_s[0] += 0.0001
        return now_s[0]

    clock = SimpleNamespace(perf_counter=perf_counter, time=lambda: now_s[0] + 1000)
    monkeypatch.setattr(devices, "time", clock)
    return now_s


def test_clock_of_a_gpu_tells_when_it_reached_a_point_and_does_not_wait(gpu, host_s):
    found = DeviceClock(torch.device("meta"))
    gpu.is_busy = True
    moment = found.mark()
    assert found.reached_unix_s(moment) is None
    gpu.now_ms += 250
    gpu.is_busy = False
    assert moment.event.query()
    host_s[0] = 700.0  # asked much later
    assert found.reached_unix_s(moment) == pytest.approx(1100.25, abs=0.001)


def test_clock_of_a_gpu_compares_with_the_hosts_once_a_second(gpu, host_s):
    found = DeviceClock(torch.device("meta"))
    reached = []
    for host_s[0] in (100.0, 100.75, 101.5, 102.25):
        reached.append(found.reached_unix_s(found.mark()) - 1000)
        gpu.now_ms += 1000  # faster than the host
    assert reached == pytest.approx([100.0, 101.0, 101.5, 102.5], abs=0.001)


def test_clock_of_a_gpu_does_not_wait_for_a_comparison(gpu, host_s):
    """A queue of the GPU may be behind an operation that waits for another rank."""
    found = DeviceClock(torch.device("meta"))
    gpu.is_full = True
    assert found.mark() is None
    assert host_s[0] < 100.01
    gpu.is_full = False
    assert found.mark() is None  # asked again after a second only
    host_s[0] += 2
    assert found.mark() is not None


def test_clock_of_a_gpu_has_streams_that_nothing_else_uses(gpu):
    DeviceClock(torch.device("meta"))
    assert gpu.Stream.priorities == [-2, -2]
    gpu.Stream.highest = -2  # that of torch's own streams with high priority
    with pytest.raises(EnvironmentLacks, match="expected stream priorities up to -3, found -2"):
        DeviceClock(torch.device("meta"))
