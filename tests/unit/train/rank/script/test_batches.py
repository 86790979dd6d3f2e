"""Samples of a step, counted from batches."""

from __future__ import annotations

import torch

from paceline.train.rank.script.batches import BatchCounter, samples_of


def batch(samples):
    return [torch.ones(samples, 3), torch.zeros(samples)]


def test_a_batch_counts_at_the_next_backward_pass():
    counter = BatchCounter()
    for samples in (4, 4, 2):
        counter.fetched(batch(samples))
        counter.passed_backward()
        assert counter.take() == samples


def test_accumulated_batches_add_up_and_several_passes_over_one_do_not():
    counter = BatchCounter()
    for samples in (4, 3):
        counter.fetched(batch(samples))
        counter.passed_backward()
        counter.passed_backward()
    assert counter.take() == 7


def test_a_batch_that_is_fetched_ahead_does_not_count_twice():
    counter = BatchCounter()
    counter.fetched(batch(4))
    counted = []
    for last in (False, False, True):
        if not last:
            counter.fetched(batch(4))
        counter.passed_backward()
        counted.append(counter.take())
    assert counted == [4, 4, 4]


def test_nothing_is_counted_without_a_batch_or_a_pass():
    counter = BatchCounter()
    counter.passed_backward()
    assert counter.take() is None
    counter.fetched("no tensor")
    assert counter.first_sha256 is None
    counter.fetched(batch(4))
    assert counter.take() is None


def test_equal_first_batches_have_equal_checksums():
    counters = [BatchCounter() for _ in range(3)]
    for counter, samples in zip(counters, (4, 4, 5), strict=True):
        counter.fetched(batch(samples))
        counter.fetched(batch(1))
    first, second, third = (counter.first_sha256 for counter in counters)
    assert first == second != third


def test_samples_are_the_rows_of_tensors_as_long_as_the_first():
    assert len(samples_of({"a": torch.ones(3, 2), "b": [torch.ones(3), torch.ones(7)]})) == 2
    assert samples_of({"n": torch.tensor(3.0), "empty": torch.ones(0)}) == []
