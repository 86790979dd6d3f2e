import pytest
import torch

from paceline.costs.factor_cost import LinearShape
from paceline.strategies.reduction import calibration


@pytest.fixture
def transfer(monkeypatch):
    """Make a transfer over a link of this speed in bytes per second, without waiting."""

    def over(bytes_per_s):
        sizes = []

        def slowest_s(run):
            run()
            return sizes[-1] / bytes_per_s

        monkeypatch.setattr(calibration, "_slowest_s", slowest_s)
        return sizes, sizes.append

    return over


def test_transfer_is_doubled_until_it_takes_40_ms(transfer):
    sizes, send = transfer(10_000_000)
    assert calibration._long_enough(send) == pytest.approx((2**19, 0.0524288))
    assert sizes == [2**16, 2**17, 2**18, *[2**19] * 3]


def test_fast_link_is_measured_with_8_mib_at_most(transfer):
    sizes, send = transfer(10_000_000_000)
    assert calibration._long_enough(send)[0] == 2**23
    assert sizes[-3:] == [2**23] * 3
    assert len(sizes) == 10


def test_pause_in_one_transfer_does_not_decide(monkeypatch):
    times = iter([0.19, 0.05, 0.06])
    monkeypatch.setattr(calibration, "_slowest_s", lambda _run: next(times))
    assert calibration._long_enough(lambda _size: None) == (2**16, 0.05)


def test_very_slow_link_is_measured_once(transfer):
    sizes, send = transfer(10_000)
    assert calibration._long_enough(send) == pytest.approx((2**16, 6.5536))
    assert sizes == [2**16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_of_the_same_factors_has_the_same_checksum(dtype):
    shape = LinearShape(inputs=64, outputs=32)
    speeds, checksums = zip(*(calibration._product(shape, 8, dtype) for _ in range(2)), strict=True)
    assert min(speeds) > 0
    assert checksums[0] == checksums[1] != 0
    assert calibration._product(shape, 9, dtype)[1] != checksums[0]
