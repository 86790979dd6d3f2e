from __future__ import annotations

import pytest
import torch

from paceline.train.transports.compression import Blockwise, Half


@pytest.mark.parametrize(("name", "relative"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_rounding_to_16_bits_errs_by_at_most_half_a_last_bit(name, relative):
    numbers = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    codec = Half(name)
    encoded = codec.encode(numbers)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (3, 2000)
    assert ((codec.decode(encoded) - numbers).abs() <= relative * numbers.abs()).all()


def test_fp16_saturates_where_bf16_does_not():
    numbers = torch.tensor([[1e6, -1e6, 65504.0, float("nan")]])
    found = Half("fp16").decode(Half("fp16").encode(numbers))[0]
    assert found[:3].tolist() == [65504.0, -65504.0, 65504.0]
    assert found[3].isnan()
    assert Half("bf16").decode(Half("bf16").encode(numbers))[0, 0] == pytest.approx(1e6, rel=0.01)


def test_int8_errs_by_at_most_half_a_step_of_its_block():
    numbers = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    numbers[0, 0] = 1000.0  # takes the precision of its own block only
    codec = Blockwise(block=16)
    encoded = codec.encode(numbers)
    assert encoded.shape == (2, 64 + 4 * 4)
    blocks, found = numbers.view(-1, 16), codec.decode(encoded).view(-1, 16)
    steps = blocks.abs().amax(dim=1, keepdim=True) / 127
    assert ((found - blocks).abs() <= steps * 0.5001).all()
    assert (found[1:] - blocks[1:]).abs().max() < 0.02


def test_int8_of_zeros_is_zeros_and_of_not_a_number_stays_that():
    codec = Blockwise(block=4)
    numbers = torch.zeros(1, 8)
    numbers[0, 5] = float("nan")
    found = codec.decode(codec.encode(numbers))[0]
    assert found[:4].tolist() == [0.0] * 4
    assert found[4:].isnan().all()
