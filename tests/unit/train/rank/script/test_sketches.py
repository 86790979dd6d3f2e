"""Sketches add up as tensors do, and show how far tensors are apart."""

from __future__ import annotations

import torch
from numpy.testing import assert_allclose

from paceline.analysis.equivalence.exchange import numbers
from paceline.train.rank.script.own_gradients import sections, sketch
from paceline.train.rank.script.tensors import Checksums

SIZES = (1, 63, 64, 65, 2**16 + 3)


def random(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_the_sketch_of_a_mean_is_the_mean_of_sketches():
    for size in SIZES:
        a, b = random(size, 1), random(size, 2)
        mean = (numbers(sketch(a)) + numbers(sketch(b))) / 2
        assert_allclose(numbers(sketch((a + b) / 2)), mean, rtol=1e-5, atol=1e-4)


def test_small_tensors_keep_their_elements_up_to_signs():
    tensor = random(40)
    assert_allclose(abs(numbers(sketch(tensor)))[:40], tensor.abs().numpy(), rtol=1e-6)


def test_norms_are_estimated_within_a_quarter():
    # The variance of a squared norm is at most 2/64 of its square.
    estimates = [
        float((numbers(sketch(random(5000, seed))) ** 2).sum()) / 5000 for seed in range(40)
    ]
    assert abs(sum(estimates) / 40 - 1) < 0.1
    assert all(0.4 < each < 1.8 for each in estimates)


def test_parts_have_the_sketches_of_their_elements():
    tensor = random(10)
    parts = [sketch(each) for each in sections(tensor.reshape(5, 2), 6, 2)]
    assert parts == [sketch(tensor[:6]), sketch(tensor[6:])]
    assert sections(tensor, 10, 2)[1].numel() == 0


def test_a_changed_bit_changes_the_checksum():
    tensor = random(1000)
    other = tensor.clone()
    other[7] = torch.nextafter(other[7], torch.tensor(9.0))
    assert sketch(tensor).crc32 != sketch(other).crc32
    assert sketch(tensor.bfloat16()).low
    assert sketch(torch.tensor([1.0, float("inf")])).l2 == -1


def test_a_checksum_is_computed_once_until_it_is_forgotten():
    tensor, checksums = random(2**16 + 3), Checksums()
    assert checksums.known(tensor) is None
    first = sketch(tensor, checksums)
    assert checksums.known(tensor.detach()) == checksums.of(tensor) == first.crc32
    tensor += 1
    assert sketch(tensor, checksums).crc32 == first.crc32  # it was not forgotten
    checksums.forget()
    assert checksums.of(tensor) == sketch(tensor).crc32 != first.crc32


def test_tensors_that_share_memory_or_follow_each_other_in_it_have_their_own_checksums():
    checksums = Checksums()
    tensor = random(12).reshape(3, 4)
    views = (tensor, tensor.t(), tensor[:2], tensor.double(), tensor.bfloat16())
    assert [checksums.of(each) for each in views] == [sketch(each).crc32 for each in views]
    made = [checksums.of(random(1000, seed)) for seed in range(20)]
    assert made == [sketch(random(1000, seed)).crc32 for seed in range(20)]
