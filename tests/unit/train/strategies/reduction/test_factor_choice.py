"""The choice for each layer, with speeds that the tests state, and the measurement of speeds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.support.trials import changed

from paceline.base.errors import EnvironmentLacks
from paceline.plan.costs import FactorSpeeds, LinearShape
from paceline.train.strategies.reduction import factor_choice
from paceline.train.strategies.reduction.factor_choice import ChoiceContext, choose, setting_of

LARGE = LinearShape(inputs=4096, outputs=4096)
SMALL = LinearShape(inputs=256, outputs=3)
SLOW_LINK = FactorSpeeds(
    latency_s=1e-4, all_reduce_bytes_per_s=1e7, all_gather_bytes_per_s=1e7, product_flop_per_s=5e10
)
SLOW_CORE = FactorSpeeds(
    latency_s=1e-4, all_reduce_bytes_per_s=1e10, all_gather_bytes_per_s=1e10, product_flop_per_s=1e9
)


def context(setting="auto", ranks=2, samples=32, workers=1):
    return ChoiceContext(
        setting=setting,
        samples=samples,
        dtype=torch.float32,
        gathering=None,
        reducing=None,
        ranks=ranks,
        workers=workers,
    )


@pytest.fixture
def measured(monkeypatch):
    """Let `measure` return the given speeds; keep its arguments."""
    calls = []

    def prepare(speeds, bits_are_equal=True):
        def measure(*arguments):
            calls.append(arguments)
            return speeds, bits_are_equal

        monkeypatch.setattr(factor_choice, "measure", measure)
        return calls

    return prepare


def test_auto_sends_factors_of_the_layers_for_which_they_are_faster(measured):
    calls = measured(SLOW_LINK)
    choice = choose({"large": LARGE, "small": SMALL}, context())
    assert choice.chosen == ("large",)
    assert calls[0][2:] == (LARGE, 64, torch.float32)


def test_product_is_measured_with_the_samples_of_all_owners_and_sped_up_by_the_workers(measured):
    calls, layer = measured(SLOW_LINK), LinearShape(inputs=4096, outputs=4096, owners=3)
    choice = choose({"large": layer}, context("always", workers=2))
    assert calls[0][2:] == (layer, 3 * 64, torch.float32)
    assert choice.speeds.product_flop_per_s == 2 * 5e10


def test_auto_reduces_gradients_where_the_larger_product_takes_longer(measured):
    measured(SLOW_CORE)
    choice = choose({"large": LARGE}, context())
    assert choice.chosen == ()
    (layer,) = choice.layers
    assert layer.factors.sent_bytes < layer.all_reduce.sent_bytes
    assert layer.factors.seconds > layer.all_reduce.seconds


def test_nothing_is_measured_where_factors_save_no_bytes(measured):
    calls = measured(SLOW_LINK)
    choice = choose({"small": SMALL}, context())
    assert choice.chosen == ()
    assert calls == []
    assert choice.describe()["speeds"] is None


def test_many_ranks_make_factors_larger_than_gradients(measured):
    calls = measured(SLOW_LINK)
    # 32 rows x 8,192 features go to each of 255 ranks; a gradient crosses the link twice.
    assert choose({"large": LARGE}, context(ranks=256)).chosen == ()
    assert calls == []
    assert choose({"large": LARGE}, context(ranks=16)).chosen == ("large",)


@pytest.mark.parametrize(("setting", "chosen"), [("always", ("small",)), ("never", ())])
def test_setting_overrides_the_costs(measured, setting, chosen):
    measured(SLOW_LINK)
    assert choose({"small": SMALL}, context(setting)).chosen == chosen


def test_different_processors_reduce_gradients(measured):
    measured(SLOW_LINK, bits_are_equal=False)
    choice = choose({"large": LARGE}, context())
    assert choice.chosen == ()
    assert "processors" in choice.describe()["reason"]
    with pytest.raises(EnvironmentLacks, match='use processors of one kind, or "never"'):
        choose({"large": LARGE}, context("always"))


def test_records_hold_both_costs_of_each_layer(measured):
    measured(SLOW_LINK)
    described = choose({"large": LARGE}, context()).describe()
    assert described["setting"] == "auto"
    assert described["speeds"] is not None
    assert described["speeds"]["product_flop_per_s"] == 5e10
    (layer,) = described["layers"]
    assert layer["layer"] == "large"
    assert layer["sends_factors"] is True
    assert layer["all_reduce"]["sent_bytes"] == 4 * 4096 * 4097
    assert layer["factors"]["sent_bytes"] == 32 * 8192 * 4
    assert choose({}, context()).describe() == {}


@pytest.mark.parametrize(
    ("transport", "nodes", "sending", "setting"),
    [
        ("gloo", 2, {}, "auto"),
        ("gloo", 1, {}, "never"),
        ("gloo", 1, {"sufficient_factors": "always"}, "always"),
        ("gloo", 2, {"sufficient_factors": "never"}, "never"),
        ("gloo", 2, {"compression": {"method": "bf16"}}, "never"),
        ("nccl", 2, {}, "never"),  # it joins all ranks at once
        ("gloo", 2, {"local_strategy": "processes", "reduction": "zero-1"}, "never"),
    ],
)
def test_auto_is_for_exact_gradients_between_nodes(make_trial, transport, nodes, sending, setting):
    base = make_trial()
    placement = base.placement.model_dump() | {"nodes": nodes}
    trial = changed(base, transport=transport, placement=placement, **sending)
    assert setting_of(trial) == setting


@pytest.fixture
def transfer(monkeypatch):
    """Make a transfer over a link of this speed in bytes per second, without waiting."""

    def over(bytes_per_s):
        sizes = []

        def slowest_s(run):
            run()
            return sizes[-1] / bytes_per_s

        monkeypatch.setattr(factor_choice, "_slowest_s", slowest_s)
        return sizes, sizes.append

    return over


def test_transfer_is_doubled_until_it_takes_40_ms(transfer):
    sizes, send = transfer(10_000_000)
    assert factor_choice._long_enough(send) == pytest.approx((2**19, 0.0524288))
    assert sizes == [2**16, 2**17, 2**18, *[2**19] * 3]


def test_fast_link_is_measured_with_8_mib_at_most(transfer):
    sizes, send = transfer(10_000_000_000)
    assert factor_choice._long_enough(send)[0] == 2**23
    assert sizes[-3:] == [2**23] * 3
    assert len(sizes) == 10


def test_pause_in_one_transfer_does_not_decide(monkeypatch):
    times = iter([0.19, 0.05, 0.06])
    monkeypatch.setattr(factor_choice, "_slowest_s", lambda _run: next(times))
    assert factor_choice._long_enough(lambda _size: None) == (2**16, 0.05)


def test_very_slow_link_is_measured_once(transfer):
    sizes, send = transfer(10_000)
    assert factor_choice._long_enough(send) == pytest.approx((2**16, 6.5536))
    assert sizes == [2**16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_of_the_same_factors_has_the_same_checksum(dtype):
    shape = LinearShape(inputs=64, outputs=32)
    speeds, checksums = zip(
        *(factor_choice._product(shape, 8, dtype) for _ in range(2)), strict=True
    )
    assert min(speeds) > 0
    assert checksums[0] == checksums[1] != 0
    assert factor_choice._product(shape, 9, dtype)[1] != checksums[0]


@pytest.mark.parametrize("other_checksum", [5.0, 6.0])
def test_speeds_are_those_of_the_slowest_of_three_ranks(monkeypatch, other_checksum):
    latencies_s, transfers = iter([9.0, 4.0, 8.0, 6.0, 7.0]), iter([(6000, 2.0), (3000, 1.0)])
    of_other_rank = {-8e9: -4e9, 5.0: other_checksum, -5.0: -other_checksum}
    for name, fake in {
        "dist": SimpleNamespace(get_world_size=lambda _: 3, all_reduce=lambda *_, **__: None),
        "all_gather_single": lambda *_, **__: None,
        "_slowest_s": lambda _run: next(latencies_s),
        "_long_enough": lambda _transfer: next(transfers),
        "_product": lambda *_: (8e9, 5.0),
        "_largest": lambda value: max(value, of_other_rank[value]),
    }.items():
        monkeypatch.setattr(factor_choice, name, fake)
    speeds, bits_are_equal = factor_choice.measure(None, None, LARGE, 64, torch.float32)
    # a ring gathers in 2 rounds and twice the bytes, and reduces by sending 4/3 of them
    assert speeds == FactorSpeeds(
        latency_s=2.0, all_gather_bytes_per_s=6000.0, all_reduce_bytes_per_s=4000.0,
        product_flop_per_s=4e9,
    )  # fmt: skip
    assert bits_are_equal == (other_checksum == 5.0)
