from __future__ import annotations

import pytest
import torch
from tests.support import oracle
from torch import nn

from paceline.plan.sample_order import sample_key
from paceline.training.dropout import SampleDropout, set_sample_keys, use_sample_dropout
from paceline.workloads.build import build_model, make_task

SEED = 7


def masks(ids, units=1000, p=0.5, layer=0, epoch=0):
    dropout = SampleDropout(p, layer)
    dropout.set_keys(SEED, epoch, ids)
    return dropout(torch.ones(len(ids), units))


def splitmix64(state):
    """The generator of Steele, Lea, Flood (OOPSLA 2014), one 64-bit word a call."""
    mask = 2**64 - 1
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        word = state
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        yield word ^ (word >> 31)


def test_mask_is_splitmix64_of_the_samples_key():
    generator = splitmix64(sample_key(SEED, 0, 12, 100))
    bits = [
        (word >> shift) & 0xFFFF
        for word, _ in zip(generator, range(3), strict=False)
        for shift in (0, 16, 32, 48)
    ]
    want = [2.0 if part >= 2**15 else 0.0 for part in bits[:10]]
    assert masks([12], units=10).tolist() == [want]


def test_samples_keep_their_masks_however_the_batch_is_split():
    whole = masks([4, 9, 2, 7])
    parts = torch.cat([masks([4]), masks([9, 2]), masks([7])])
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
def test_units_are_dropped_at_the_rate_asked_and_the_rest_scaled(p):
    units = masks(range(100), units=1001, p=p)
    assert (units == 0).float().mean().item() == pytest.approx(p, abs=0.005)
    assert torch.unique(units).tolist() == pytest.approx([0.0, 1 / (1 - p)])


def test_masks_of_samples_epochs_and_layers_are_independent():
    first = masks([1], units=10_000)
    for other in (masks([2], 10_000), masks([1], 10_000, layer=1), masks([1], 10_000, epoch=1)):
        assert (first == other).float().mean().item() == pytest.approx(0.5, abs=0.03)


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
    model = nn.Sequential(SampleDropout(0.5, 3))
    ones = torch.ones(2, 50)
    for epoch in (0, 1):
        set_sample_keys(model, SEED, epoch, [4, 11])
        keys = [oracle.sample_key(SEED, epoch, sample, 103) for sample in (4, 11)]
        kept = torch.tensor([oracle.dropout_mask(key, 50, 0.5).tolist() for key in keys])
        assert torch.equal(model(ones), 2.0 * kept)
