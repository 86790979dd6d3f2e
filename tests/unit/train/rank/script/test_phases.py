"""Phases of a step: sums are exact for given times, and the two timed functions are found."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from paceline.collectives.recorder import Operation
from paceline.train.rank.script.phases import PhaseTimer

OFFSET_S = 1000.0


def operation(arrived_s: float, ended_s: float, *, awaited: bool = False) -> Operation:
    return Operation(
        group="0", ranks=2, operation="allreduce", payload_bytes=8, awaited=awaited,
        arrived_unix_s=arrived_s + OFFSET_S, ended_unix_s=ended_s + OFFSET_S,
    )  # fmt: skip


@pytest.fixture
def timer() -> PhaseTimer:
    """A step from 0 s with 1 s of waiting for data and a backward pass from 4 to 10 s."""
    made = PhaseTimer()
    made.begin(0.0)
    made._waited(0.0, 1.0)
    made._passed_backward(4.0, 10.0)
    return made


def test_without_operations_the_pass_is_backward_alone(timer):
    times = timer.end(11.0, [], OFFSET_S)
    assert (times.data_wait_s, times.forward_s, times.backward_s) == (1.0, 3.0, 6.0)
    assert (times.comm_s, times.comm_ready_unix_s) == (None, None)


def test_communication_is_exposed_from_the_last_request_in_the_backward_pass(timer):
    times = timer.end(11.0, [operation(5.0, 9.0), operation(8.0, 9.5)], OFFSET_S)
    assert (times.backward_s, times.comm_s) == (4.0, 2.0)
    assert times.comm_ready_unix_s == 1008.0
    assert times.total_s == 10.0


def test_averaging_after_the_backward_pass_counts_without_gaps_and_overlaps(timer):
    operations = [operation(10.5, 12.0), operation(11.0, 13.0), operation(14.0, 15.0)]
    times = timer.end(20.0, operations, OFFSET_S)
    assert (times.backward_s, times.comm_s) == (6.0, 3.5)
    assert times.comm_ready_unix_s == 1010.5


def test_operations_before_the_last_backward_pass_are_not_exposed(timer):
    timer._passed_backward(12.0, 16.0)
    times = timer.end(17.0, [operation(6.0, 9.0)], OFFSET_S)
    assert (times.forward_s, times.backward_s, times.comm_s) == (5.0, 10.0, None)


def test_operations_that_the_script_awaits_in_its_passes_are_communication(timer):
    operations = [
        operation(-3.0, -1.0, awaited=True),  # before the step
        operation(2.0, 3.0, awaited=True),
        operation(5.0, 7.0, awaited=True),
        operation(8.0, 9.5),
    ]
    times = timer.end(11.0, operations, OFFSET_S)
    assert (times.forward_s, times.backward_s, times.pass_comm_s) == (2.0, 2.0, 3.0)
    assert (times.comm_s, times.comm_ready_unix_s) == (2.0, 1008.0)
    assert times.total_s == 10.0


def test_awaited_operations_after_the_gradients_were_ready_are_counted_once(timer):
    operations = [operation(7.0, 9.5), operation(8.0, 9.0, awaited=True)]
    operations += [operation(10.0, 10.5, awaited=True)]
    times = timer.end(11.0, operations, OFFSET_S)
    assert (times.backward_s, times.comm_s, times.pass_comm_s) == (3.0, 3.5, None)


def test_a_script_that_only_awaits_operations_in_its_passes_communicates(timer):
    times = timer.end(11.0, [operation(2.0, 3.0, awaited=True)], OFFSET_S)
    assert (times.forward_s, times.backward_s, times.pass_comm_s) == (2.0, 6.0, 1.0)
    assert (times.comm_s, times.comm_ready_unix_s) == (0.0, 1010.0)


def test_a_new_step_starts_from_zero(timer):
    timer.begin(11.0)
    times = timer.end(12.0, [], OFFSET_S)
    assert (times.data_wait_s, times.forward_s, times.backward_s) == (None, None, None)
    assert times.total_s == 0.0


def test_loader_and_backward_are_timed_only_while_asked():
    timer = PhaseTimer()
    before = torch.autograd.backward
    with timer.timing():
        for (batch,) in zip(DataLoader([1.0, 2.0]), strict=True):
            torch.ones(1, requires_grad=True).mul(batch).sum().backward()
    times = timer.end(1e9, [], 0.0)
    assert times.data_wait_s is not None
    assert times.data_wait_s > 0
    assert times.backward_s is not None
    assert times.backward_s > 0
    assert torch.autograd.backward is before
