"""Sketches add up as tensors do, and show how far tensors are apart."""

from __future__ import annotations

import torch
from numpy.testing import assert_allclose

from paceline.analysis.equivalence.exchange import numbers
from paceline.train.rank.script.own_gradients import sections, sketch

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
