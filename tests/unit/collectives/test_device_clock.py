"""The clock of a GPU, on a fake GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline.collectives import device_clock
from paceline.collectives.device_clock import DeviceClock, unix_s
from paceline.collectives.errors import EnvironmentLacks


def test_moment_in_seconds_since_the_epoch(monkeypatch):
    clock = SimpleNamespace(perf_counter=lambda: 50.0, time=lambda: 1_000_000.0)
    monkeypatch.setattr(device_clock, "time", clock)
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
    monkeypatch.setattr(device_clock, "module_of", lambda _device: found)
    return found


@pytest.fixture
def host_s(monkeypatch):
    """The time of the host, in a list; each question takes 0.1 ms."""
    now_s = [100.0]

    def perf_counter():
        now_s[0] += 0.0001
        return now_s[0]

    clock = SimpleNamespace(perf_counter=perf_counter, time=lambda: now_s[0] + 1000)
    monkeypatch.setattr(device_clock, "time", clock)
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
