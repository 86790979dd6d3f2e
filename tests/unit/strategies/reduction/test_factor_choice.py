"""The choice for each layer, with speeds that the tests state instead of measuring them."""

import pytest
import torch

from paceline.costs.factor_cost import LinearShape, Speeds
from paceline.errors import EnvironmentLacks
from paceline.strategies.reduction import factor_choice
from paceline.strategies.reduction.factor_choice import (
    ChoiceContext,
    choose,
    setting_of,
)

LARGE = LinearShape(inputs=4096, outputs=4096)
SMALL = LinearShape(inputs=256, outputs=3)
SLOW_LINK = Speeds(
    latency_s=1e-4,
    all_reduce_bytes_per_s=1e7,
    all_gather_bytes_per_s=1e7,
    product_flop_per_s=5e10,
)
SLOW_CORE = Speeds(
    latency_s=1e-4,
    all_reduce_bytes_per_s=1e10,
    all_gather_bytes_per_s=1e10,
    product_flop_per_s=1e9,
)


def context(setting="auto", ranks=2, samples=32):
    return ChoiceContext(
        setting=setting,
        samples=samples,
        dtype=torch.float32,
        gathering=None,
        reducing=None,
        ranks=ranks,
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


def changed(trial, **values):
    return type(trial).model_validate(trial.model_dump() | values)


@pytest.mark.parametrize(
    ("nodes", "sending", "setting"),
    [
        (2, {}, "auto"),
        (1, {}, "never"),
        (1, {"sufficient_factors": "always"}, "always"),
        (2, {"sufficient_factors": "never"}, "never"),
        (2, {"compression": {"method": "bf16"}}, "never"),
    ],
)
def test_auto_is_for_exact_gradients_between_nodes(make_trial, nodes, sending, setting):
    base = make_trial()
    placement = base.placement.model_dump() | {"nodes": nodes}
    trial = changed(base, transport="gloo", placement=placement, transport_options=sending)
    assert setting_of(trial) == setting


def test_transport_that_joins_all_ranks_at_once_gathers_no_factors(make_trial):
    base = make_trial()
    placement = base.placement.model_dump() | {"nodes": 2}
    trial = changed(base, transport="nccl", placement=placement, transport_options={})
    assert setting_of(trial) == "never"
