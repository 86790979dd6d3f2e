from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.trials import tiny_trial

from paceline.base.errors import UsageError
from paceline.collectives.message_schedules import share_bounds
from paceline.plan.trials.sample_order import SampleOrder, SampleRandom, sample_key, sample_order_of
from paceline.plan.trials.trial import Evaluation

orders = st.builds(
    SampleOrder,
    row_group_rows=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    seed=st.integers(0, 2**31 - 1),
    global_batch=st.integers(1, 40),
    epochs=st.integers(1, 3),
    window_row_groups=st.integers(1, 5),
)


def epoch_order(order: SampleOrder, epoch: int) -> list[int]:
    """Return all sample ids of an epoch in order of training."""
    return [i for window in order.windows(epoch) for i in window.sample_ids.tolist()]


def all_steps(order: SampleOrder) -> list[list[int]]:
    return [order.step(step).sample_ids.tolist() for step in range(order.steps)]


def test_the_order_itself_which_checkpoints_rely_on():
    """A checkpoint holds a step number: another order would repeat and omit samples."""
    order = SampleOrder([5, 3], seed=7, global_batch=4, epochs=2)
    assert all_steps(order) == [[6, 0, 2, 3], [7, 5, 1, 4], [2, 4, 1, 5], [6, 3, 0, 7]]


def test_the_order_itself_with_windows_and_held_out_samples():
    order = SampleOrder(
        [5, 3, 4], seed=7, global_batch=5, epochs=2, window_row_groups=2,
        held_out_samples=3, split_seed=1,
    )  # fmt: skip
    assert all_steps(order) == [[2, 3, 0, 10, 1], [9, 7, 5, 6], [0, 2, 3, 10, 1], [9, 5, 6, 7]]
    assert all_steps(order.held_out()) == [[4, 8, 11]]


def test_samples_within_a_row_group_are_shuffled_anew_in_each_epoch():
    order = SampleOrder([64], seed=1, global_batch=8, epochs=2)
    first, second = epoch_order(order, 0), epoch_order(order, 1)
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != list(range(64))
    assert first != second


@settings(max_examples=60, deadline=None)
@given(orders, st.integers(1, 7))
def test_each_sample_once_an_epoch_whatever_the_world_size(order, world_size):
    seen: dict[int, list[int]] = {}
    for number in range(order.steps):
        step = order.step(number)
        shares = [step.share(rank, world_size) for rank in range(world_size)]
        assert np.array_equal(np.concatenate(shares), step.sample_ids)
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        seen.setdefault(step.epoch, []).extend(step.sample_ids.tolist())
    assert sorted(seen) == list(range(order.epochs))
    for epoch, ids in seen.items():
        assert sorted(ids) == list(range(order.samples))
        assert ids == epoch_order(order, epoch)


def test_no_more_than_a_few_windows_are_kept():
    """An order of many samples needs memory for a byte per sample, not for their ids."""
    order = SampleOrder([1000] * 400, seed=1, global_batch=7000, epochs=2, window_row_groups=4)
    seen = np.concatenate([order.step(number).sample_ids for number in range(order.steps)])
    assert len(seen) == 2 * order.samples
    assert order._window.cache_info().currsize == 8


@settings(max_examples=30, deadline=None)
@given(orders)
def test_window_holds_just_its_row_groups_samples(order):
    groups_seen = []
    for window in order.windows(0):
        assert len(window.row_groups) <= order.window_row_groups
        groups_seen += window.row_groups
        rows = sum(order.row_group_rows[g] for g in window.row_groups)
        assert len(window.sample_ids) == rows
        assert order.row_groups_of(window.sample_ids) == sorted(window.row_groups)
    assert sorted(groups_seen) == list(range(len(order.row_group_rows)))


def test_order_depends_on_seed_and_epoch():
    def order(seed: int, epoch: int) -> list[int]:
        return epoch_order(SampleOrder([16] * 4, seed=seed, global_batch=8, epochs=2), epoch)

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


@settings(max_examples=60, deadline=None)
@given(orders, st.integers(0, 2**31 - 1), st.data())
def test_held_out_samples_are_in_no_step(order, split_seed, data):
    held_out_samples = data.draw(st.integers(0, order.samples - 1))
    changes = {"held_out_samples": held_out_samples, "split_seed": split_seed}
    split = replace(order, **changes)
    held_out = split.held_out()
    kept = [held_out.step(n).sample_ids.tolist() for n in range(held_out.steps)]
    assert [len(ids) for ids in kept if len(ids) < order.global_batch][1:] == []
    ids = [i for step in kept for i in step]
    assert len(set(ids)) == len(ids) == held_out_samples
    for epoch in range(order.epochs):
        assert sorted([*epoch_order(split, epoch), *ids]) == list(range(order.samples))
    # another seed of the training, batch or window changes the order, not the split
    other = replace(split, seed=order.seed + 1, global_batch=1, window_row_groups=1)
    assert set(epoch_order(other.held_out(), 0)) == set(ids)


def test_held_out_samples_depend_on_their_seed_and_leave_some_to_train():
    order = SampleOrder([40], seed=1, global_batch=8, epochs=1, held_out_samples=10)
    again = replace(order, split_seed=2)
    assert order.samples == 30
    assert order.steps_per_epoch == 4
    assert order.held_out().samples == 10
    assert set(epoch_order(order.held_out(), 0)) != set(epoch_order(again.held_out(), 0))
    with pytest.raises(UsageError, match=r"fewer than the data set's 40 samples, got 40"):
        replace(order, held_out_samples=40)


def test_order_of_a_training_holds_out_the_samples_of_its_evaluations():
    evaluation = Evaluation(held_out_samples=5, split_seed=3, every_steps=1, every_epochs=None)
    found = [
        sample_order_of(tiny_trial(training={"evaluation": each}).training, [20])
        for each in (None, evaluation)
    ]
    assert [each.held_out_samples for each in found] == [0, 5]
    assert found[1].split_seed == 3


def test_last_incomplete_batch_is_kept():
    order = SampleOrder([10, 10, 3], seed=1, global_batch=10, epochs=1)
    assert [len(order.step(i).sample_ids) for i in range(order.steps)] == [10, 10, 3]
    assert [len(order.step(2).share(rank, 4)) for rank in range(4)] == [1, 1, 1, 0]


def test_max_steps_ends_training_and_used_samples_follow():
    order = SampleOrder([10] * 5, seed=1, global_batch=10, epochs=4, max_steps=2)
    assert order.steps == 2
    expected = np.sort(np.concatenate([order.step(i).sample_ids for i in range(2)]))
    assert np.array_equal(order.used_sample_ids(), expected)
    longer = SampleOrder([10] * 5, seed=1, global_batch=10, epochs=4, max_steps=7)
    assert len(longer.used_sample_ids()) == 50


def test_used_samples_of_a_rank_are_those_of_its_shares():
    order = SampleOrder(row_group_rows=(9, 8), seed=4, global_batch=6, epochs=2, max_steps=5)
    for rank in range(2):
        shares = [order.step(number).share(rank, 2) for number in range(order.steps)]
        assert order.used_sample_ids(rank, 2).tolist() == sorted({*np.concatenate(shares).tolist()})


def test_rank_that_never_sees_a_sample_keeps_one_for_its_feed():
    order = SampleOrder(row_group_rows=(5,), seed=4, global_batch=1, epochs=1)
    assert order.used_sample_ids(1, 2).tolist() == [0]


@pytest.mark.parametrize(
    "values",
    [
        {"row_group_rows": []},
        {"row_group_rows": [3, 0]},
        {"global_batch": 0},
        {"epochs": 0},
        {"max_steps": 0},
    ],
)
def test_values_that_cannot_work_are_refused(values):
    with pytest.raises(UsageError):
        SampleOrder(**{"row_group_rows": [4], "seed": 1, "global_batch": 2, "epochs": 1, **values})


def test_shares_cover_without_overlap():
    bounds = [share_bounds(10, rank, 4) for rank in range(4)]
    assert bounds == [(0, 3), (3, 6), (6, 8), (8, 10)]


def test_half_of_the_samples_are_flipped_and_each_epoch_anew():
    first = np.array([SampleRandom(1, 0, i).coin for i in range(4000)])
    second = np.array([SampleRandom(1, 1, i).coin for i in range(4000)])
    # 4 standard deviations of a fair coin
    assert abs(first.mean() - 0.5) < 4 * 0.5 / 4000**0.5
    assert abs((first == second).mean() - 0.5) < 4 * 0.5 / 4000**0.5


def test_sample_keys_do_not_collide_between_streams_epochs_and_samples():
    keys = {sample_key(1, e, i, s) for e in range(3) for i in range(200) for s in range(3)}
    assert len(keys) == 1800
    assert all(0 <= key < 2**63 for key in keys)


def test_key_of_a_sample_which_repeated_runs_rely_on():
    """Hashed with SplitMix64, computed apart from the product."""
    assert sample_key(7, 1, 12, 100) == 3_805_603_151_412_241_992
