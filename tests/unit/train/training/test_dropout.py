from __future__ import annotations

import pytest
import torch
from tests.support import oracle
from torch import nn

from paceline.base.errors import UsageError
from paceline.train.training.dropout import SampleDropout, set_sample_keys, use_sample_dropout
from paceline.train.workloads.build import build_model, make_task

SEED = 7


def test_evaluation_and_p_zero_change_nothing():
    units = torch.randn(3, 8)
    assert SampleDropout(0.5, 0).eval()(units) is units
    assert SampleDropout(0.0, 0)(units) is units


def test_gradient_passes_where_units_are_kept():
    dropout = SampleDropout(0.5, 0)
    dropout.set_keys(SEED, 0, [3])
    units = torch.ones(1, 50, requires_grad=True)
    kept = dropout(units)
    kept.sum().backward()
    assert torch.equal(units.grad, kept.detach())


@pytest.mark.parametrize("ids", [[], [1, 2, 3]])
def test_keys_of_other_samples_are_refused(ids):
    dropout = SampleDropout(0.5, 0)
    dropout.set_keys(SEED, 0, ids)
    with pytest.raises(ValueError, match="set_sample_keys"):
        dropout(torch.ones(2, 4))


def test_type_of_the_units_is_kept():
    dropout = SampleDropout(0.5, 0)
    dropout.set_keys(SEED, 0, [1])
    assert dropout(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_replicas_keep_keys_of_their_own():
    one, two = (build_model(make_task("tiny", classes=3, dropout=True, seed=1)) for _ in range(2))
    images = torch.randn(1, 3, 32, 32)
    set_sample_keys(one, SEED, 0, [1])
    set_sample_keys(two, SEED, 0, [2])
    first = one(images)
    assert not torch.equal(first, two(images))
    assert torch.equal(first, one(images))


def test_layer_used_in_two_places_is_replaced_in_both_with_masks_of_their_own():
    dropout = nn.Dropout(0.5)
    model = nn.Sequential(nn.Flatten(), dropout, nn.Sequential(dropout))
    use_sample_dropout(model, enabled=True)
    layers = [model.get_submodule(path) for path in ("1", "2.0")]
    assert all(type(layer) is SampleDropout for layer in layers)
    set_sample_keys(model, SEED, 0, [1])
    first, second = (layer(torch.ones(1, 1000)) for layer in layers)
    assert (first == second).float().mean().item() == pytest.approx(0.5, abs=0.1)


def test_layer_of_a_block_used_twice_is_replaced():
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model = nn.Sequential(block, block)
    use_sample_dropout(model, enabled=True)
    assert type(model.get_submodule("0.1")) is SampleDropout
    assert model.get_submodule("1.1") is model.get_submodule("0.1")


def test_masks_depend_on_the_place_of_the_layer_in_the_model():
    model = nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.ReLU(), nn.Dropout(0.2)), nn.Tanh())
    use_sample_dropout(model, enabled=True)
    numbers = {n: m.layer for n, m in model.named_modules() if isinstance(m, SampleDropout)}
    # modules in order: the model, 0, 1, 1.0, 1.1, 2
    assert numbers == {"0": 10_001, "1.1": 10_004}


def test_state_dict_has_nothing_of_it():
    assert not SampleDropout(0.5, 0).state_dict()


def test_samples_set_for_a_model_have_the_masks_of_the_oracle_in_each_epoch():
    model = nn.Sequential(SampleDropout(0.3, 3))
    units = 100_001  # of 16 bits each: some are exactly the threshold
    for epoch in (0, 1):
        set_sample_keys(model, SEED, epoch, [4, 11])
        keys = [oracle.sample_key(SEED, epoch, sample, 103) for sample in (4, 11)]
        kept = torch.tensor([oracle.dropout_mask(key, units, 0.3).tolist() for key in keys])
        torch.testing.assert_close(model(torch.ones(2, units)), kept / 0.7)


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_rate_that_is_no_share_or_keeps_nothing_is_refused(p):
    with pytest.raises(ValueError, match="0 <= p < 1"):
        SampleDropout(p, 0)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout2d(0.1), nn.AlphaDropout(0.1), nn.RReLU(),
        nn.MultiheadAttention(4, 2, dropout=0.1), nn.LSTM(4, 4, 2, dropout=0.1),
    ],
)  # fmt: skip
def test_layer_that_draws_masks_by_itself_is_refused_by_name(layer):
    without = nn.Sequential(nn.Dropout2d(0), nn.MultiheadAttention(4, 2), nn.LSTM(4, 4, 2))
    use_sample_dropout(without, enabled=True)
    with pytest.raises(UsageError, match=rf"layer 3 \({type(layer).__name__}\): its dropout draws"):
        use_sample_dropout(without.append(layer), enabled=True)
