"""A server's shard without communication: order, counts, bounds and the arithmetic of updates."""

from __future__ import annotations

import pytest
import torch
from tests.support.checkpoints import read_checkpoint, save_part
from torch import nn

from paceline.base.errors import RankFailed
from paceline.train.strategies.parameter_server.descriptor import ParameterServerOptions
from paceline.train.strategies.parameter_server.messages import RequestHeader, ServerShard
from paceline.train.strategies.reduction.flat_layout import FlatLayout
from paceline.train.training.state import RankState
from paceline.train.training.task import Task, TaskSettings

RATE = 0.5
START = [1.0, 2.0, 3.0]


def make_shard(update_mode="asynchronous", bound_steps=None):
    parameter = nn.Parameter(torch.tensor(START))
    layout = FlatLayout.of([("w", parameter)])
    flat = torch.zeros(layout.elements)
    layout.bind({"w": parameter}, flat, copy=True)
    task = Task(TaskSettings(learning_rate=RATE, momentum=0.0))
    options = ParameterServerOptions(update_mode=update_mode, staleness_bound_steps=bound_steps)
    return ServerShard(layout, layout.shards(1)[0], flat, task, rank=0, workers=2, options=options)


def push(shard, worker, step, gradient=1.0, *, sequence=None, version=0, share=0.5):
    request = RequestHeader(
        pushes=True, pushed=step if sequence is None else sequence, clock=step + 1,
        version=version, share=share,
    )  # fmt: skip
    shard.push(worker, request, torch.full((3,), gradient))


def test_request_arrives_as_it_was_sent():
    request = RequestHeader(
        pushes=True, leaves=True, pushed=3, clock=2**40 + 1, needed_clock=7, version=11, share=0.25
    )
    assert RequestHeader.decoded(request.encoded()) == request


def test_asynchronous_update_is_applied_at_once():
    shard = make_shard()
    push(shard, 0, 0, gradient=1.0)
    assert shard.weights.tolist() == [v - RATE for v in START]
    assert shard.version == 1


def test_staleness_is_the_number_of_updates_since_the_fetch():
    shard = make_shard()
    push(shard, 0, 0)
    push(shard, 0, 1, version=1)
    push(shard, 1, 0, version=0)
    rows = shard.take_rows()
    assert [(r.worker, r.sequence, r.staleness, r.lead_steps) for r in rows] == [
        (0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 2, 0),
    ]  # fmt: skip
    assert shard.take_rows() == []


def test_synchronous_update_waits_for_all_workers_and_is_one_step():
    shard = make_shard("synchronous")
    push(shard, 1, 0, gradient=1.0)
    assert shard.weights.tolist() == START
    assert not shard.may_fetch(1)
    push(shard, 0, 0, gradient=2.0)
    assert shard.weights.tolist() == [v - RATE * 3.0 for v in START]
    assert shard.may_fetch(1)
    assert shard.version == 1
    assert [row.staleness for row in shard.take_rows()] == [0, 0]


def test_update_without_samples_changes_no_weights_and_counts():
    shard = make_shard()
    push(shard, 0, 0, gradient=0.0, share=0.0)
    assert shard.weights.tolist() == START
    assert shard.clocks == [1, 0]


def test_lost_update_is_detected_by_the_next_one():
    shard = make_shard()
    push(shard, 1, 0)
    with pytest.raises(RankFailed, match="update 1 of rank 1 was lost"):
        push(shard, 1, 2)


def test_lost_last_update_is_detected_by_the_next_request():
    shard = make_shard()
    push(shard, 1, 0)
    shard.advance(1, 1, pushed=1)
    with pytest.raises(RankFailed, match="update 1 of rank 1 was lost"):
        shard.advance(1, 2, pushed=2)


def test_repeated_update_is_detected_and_not_applied():
    shard = make_shard()
    push(shard, 1, 0)
    weights = shard.weights.clone()
    with pytest.raises(RankFailed, match="update 0 of rank 1 arrived twice"):
        push(shard, 1, 0)
    assert torch.equal(shard.weights, weights)


def test_worker_beyond_the_bound_gets_no_weights_until_the_slowest_follows():
    shard = make_shard(bound_steps=1)
    push(shard, 0, 0)
    assert shard.may_fetch(1 - 1)  # it has finished one step and may be one ahead
    push(shard, 0, 1)
    assert not shard.may_fetch(2 - 1)
    push(shard, 1, 0)
    assert shard.may_fetch(2 - 1)
    assert shard.slowest() == [1]


def test_update_of_a_worker_that_did_not_wait_is_refused():
    shard = make_shard(bound_steps=1)
    push(shard, 0, 0)
    push(shard, 0, 1)
    with pytest.raises(RankFailed, match=r"rank 0 is 2 steps ahead .* at most 1"):
        push(shard, 0, 2)


def saved(folder, shard, **values):
    """The state of a shard as a reader gets it; values: those of it that are changed."""
    state = RankState()
    shard.add_to(state)
    state.values.update(values)
    save_part(folder, state, steps=2)
    return read_checkpoint(folder)


def test_server_continues_with_weights_clocks_and_counts(tmp_path):
    shard = make_shard()
    for step in range(2):
        push(shard, 0, step)
        push(shard, 1, step, gradient=0.5, sequence=step)
    other = make_shard()
    assert other.restore(saved(tmp_path, shard)) == [2, 2]
    assert torch.equal(other.weights, shard.weights)
    assert other.clocks == [2, 2]
    push(other, 1, 2, sequence=2)
    with pytest.raises(RankFailed, match=r"update 2 of rank 0 was lost"):
        push(other, 0, 3, sequence=3)


@pytest.mark.parametrize("counts", [None, [2], [2, -1], [2, "2"], 7])
def test_state_of_other_workers_begins_the_counts_again(tmp_path, counts):
    other = make_shard()
    assert other.restore(saved(tmp_path, make_shard(), **{"updates/0": counts})) == [0, 0]
    push(other, 0, 2, sequence=0)
