"""Errors of each compressor, and their feedback. With several ranks: tests/contract."""

from __future__ import annotations

import pytest
import torch

from paceline.train.transports.bucket_settings import CompressionSettings
from paceline.train.transports.bucket_sums import create_compressor
from paceline.train.transports.compression import (
    START_STEP,
    Blockwise,
    CodecCompressor,
    Half,
    PowerSgd,
    TernGrad,
    TopK,
    largest,
    pack,
    unpack,
)

pytestmark = pytest.mark.usefixtures("alone")


def summed(compressor, make_bucket, gradients, bucket=None):
    bucket = bucket or make_bucket(gradients)
    bucket.fill(gradients)
    compressor.sum(bucket)
    return bucket.buffer().clone()


def flat(gradients):
    return torch.cat([g.view(-1) for g in gradients])


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK({"density": 0.1}, 0),
        lambda: CodecCompressor(Blockwise(16)),
        lambda: PowerSgd({"rank": 2}, 1),
    ],
)
def test_error_feedback_sends_in_time_what_was_left_out(make, make_bucket, gradients):
    """The sums of n steps miss no more than what is still kept, however many steps there were."""
    compressor, bucket, true = make(), make_bucket(gradients), flat(gradients)
    missing = []
    total = torch.zeros_like(true)
    for step in range(1, 121):
        total += summed(compressor, make_bucket, gradients, bucket)
        missing.append((total - step * true).norm().item())
    assert missing[119] < 1.5 * missing[59] + 1e-3  # does not grow with the steps
    assert missing[119] / 120 < 0.2 * true.norm()
    # while a single step leaves out much of it, but for int8
    assert (summed(compressor, make_bucket, gradients, bucket) - true).norm() > 0.001


@pytest.mark.parametrize("codec", [Half("bf16"), Half("fp16"), Blockwise(16)])
def test_exchange_loses_what_its_codec_does(codec, make_bucket, gradients):
    found = summed(CodecCompressor(codec), make_bucket, gradients)
    true = flat(gradients)
    padded = torch.nn.functional.pad(true, (0, -len(true) % codec.block)).unsqueeze(0)
    assert torch.equal(found, codec.decode(codec.encode(padded))[0, : len(true)])
    assert 0 < (found - true).norm() < 0.02 * true.norm()


def test_topk_sends_the_largest_and_keeps_the_others(make_bucket):
    bucket = make_bucket([torch.tensor([1.0, -5.0, 2.0, 4.0, -3.0])])
    compressor = TopK({"density": 0.4}, 0)
    compressor.sum(bucket)
    assert bucket.buffer().tolist() == [0.0, -5.0, 0.0, 4.0, 0.0]
    bucket.buffer().zero_()
    compressor.sum(bucket)
    assert bucket.buffer().tolist() == [0.0, 0.0, 2.0, 0.0, -3.0]


def test_of_a_tiny_bucket_topk_sends_one_element(make_bucket):
    bucket = make_bucket([torch.tensor([1.0, 3.0])])
    TopK({"density": 0.01}, 0).sum(bucket)
    assert bucket.buffer().tolist() == [0.0, 3.0]


def test_residual_follows_its_parameter_into_another_bucket(make_bucket):
    """Buckets change after the first step of DistributedDataParallel."""
    first, second = torch.tensor([1.0, 9.0]), torch.tensor([4.0])
    compressor = TopK({"density": 0.34}, 0)
    compressor.sum(before := make_bucket([first, second]))

    class Dealt:
        """The second gradient alone, in a bucket of another number."""

        def __init__(self) -> None:
            self.flat = torch.zeros(1)

        index = staticmethod(lambda: 1)
        is_last = staticmethod(lambda: True)

        def buffer(self):
            return self.flat

        def gradients(self):
            return [self.flat]

        def parameters(self):
            return [before.parameters()[1]]

    compressor.sum(after := Dealt())
    assert after.flat.tolist() == [4.0]


def test_the_largest_are_exact_also_where_a_sample_looks_first():
    magnitudes = torch.rand(50_000, generator=torch.Generator().manual_seed(1))
    for count in (1, 7, 500, 49_999, 50_000):
        wanted = torch.topk(magnitudes, count).indices.sort().values
        assert torch.equal(largest(magnitudes, count).sort().values, wanted)


def test_of_equal_magnitudes_the_first_are_taken():
    assert largest(torch.tensor([1.0, 2.0, 1.0, 1.0]), 3).tolist() == [1, 0, 2]
    assert sorted(largest(torch.ones(20_000), 3).tolist()) == [0, 1, 2]
    assert sorted(largest(torch.zeros(20_000), 2).tolist()) == [0, 1]


def test_what_is_not_a_number_is_sent_so_that_it_shows():
    magnitudes = torch.tensor([1.0, float("nan"), 2.0])
    assert 1 in largest(magnitudes, 2).tolist()
    assert len(largest(magnitudes, 2)) == 2


def test_terngrad_is_right_in_the_mean(make_bucket):
    """Elements are drawn by themselves, so equal ones of a step count as so many steps."""
    true = [torch.tensor([0.5, -1.0, 0.25, 0.0]), torch.tensor([0.001, 0.002])]
    copies, steps = 100, 40
    gradients = [each.repeat(copies) for each in true]
    compressor, bucket = TernGrad({}, 4, clip=None), make_bucket(gradients)
    total = torch.zeros(6 * copies)
    for _ in range(steps):
        found = summed(compressor, make_bucket, gradients, bucket)
        assert set(found[: 4 * copies].tolist()) <= {-1.0, 0.0, 1.0}
        total += found
    parts = total.split([4 * copies, 2 * copies])
    large, small = (part.view(copies, -1).mean(dim=0) / steps for part in parts)
    # a standard error is at most scale * 0.5 / sqrt(4000) = 0.8 % of the scale
    torch.testing.assert_close(large, true[0], atol=0.04, rtol=0)
    torch.testing.assert_close(small, true[1], atol=0.00008, rtol=0)


def test_terngrad_draws_anew_each_step_but_the_same_in_another_run(make_bucket, gradients):
    first, again = (
        [summed(c, make_bucket, gradients) for _ in range(2)]
        for c in (TernGrad({}, 1), TernGrad({}, 1))
    )
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], summed(TernGrad({}, 2), make_bucket, gradients))


def test_terngrad_clips_what_is_far_out(make_bucket):
    values = torch.ones(1000)
    values[::2] = -1.0
    values[7] = 100.0
    found = summed(TernGrad({}, 1), make_bucket, [values])
    scale = found.abs().max().item()
    assert scale == pytest.approx(2.5 * values.std(correction=0).item())


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 1001])
def test_packed_codes_come_back(count):
    codes = torch.randint(
        0, 3, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
    )
    packed = pack(codes)
    assert len(packed) == -(-count // 4)
    signs = torch.tensor([0.0, 1.0, -1.0])
    assert torch.equal(unpack(packed)[:count], signs[codes.long()])


def test_powersgd_keeps_a_matrix_of_its_rank_and_what_is_no_matrix(make_bucket):
    generator = torch.Generator().manual_seed(2)
    matrix = torch.randn(40, 2, generator=generator) @ torch.randn(2, 50, generator=generator)
    gradients = [matrix, torch.randn(40, generator=generator)]
    compressor, bucket = PowerSgd({"rank": 2}, 3), make_bucket(gradients)
    for _ in range(START_STEP):
        assert torch.equal(summed(compressor, make_bucket, gradients, bucket), flat(gradients))
    for _ in range(3):
        found = summed(compressor, make_bucket, gradients, bucket)
        torch.testing.assert_close(found, flat(gradients), atol=1e-4, rtol=1e-4)


def test_powersgd_of_a_zero_gradient_is_zero(make_bucket):
    gradients = [torch.zeros(40, 50)]
    compressor, bucket = PowerSgd({"rank": 2}, 3), make_bucket(gradients)
    for _ in range(4):
        assert not summed(compressor, make_bucket, gradients, bucket).any()


def test_powersgd_leaves_the_global_random_numbers_alone(make_bucket, gradients):
    compressor, bucket = PowerSgd({"rank": 1}, 3), make_bucket(gradients)
    torch.manual_seed(9)
    wanted = torch.rand(3)
    torch.manual_seed(9)
    for _ in range(4):
        summed(compressor, make_bucket, gradients, bucket)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize(
    ("method", "numbers", "settings"),
    [
        ("bf16", {}, {"error_feedback": False}),
        ("fp16", {}, {"error_feedback": False}),
        ("int8", {}, {"block": 256, "error_feedback": True}),
        ("powersgd", {"rank": 3}, {"rank": 3, "start_step": 2, "error_feedback": True}),
        ("topk", {"density": 0.2}, {"density": 0.2, "error_feedback": True}),
        ("terngrad", {}, {"clip_standard_deviations": 2.5, "error_feedback": False}),
    ],
)
def test_each_method_is_made_from_its_numbers_and_says_so(method, numbers, settings):
    made = create_compressor(CompressionSettings(method=method, numbers=numbers), seed=1)
    assert (made.name, made.describe()) == (method, settings)
