import pytest

from paceline.plan.costs import (
    Cost,
    EmbeddingShape,
    FactorSpeeds,
    LinearShape,
    all_reduce_cost,
    factor_cost,
)

# AlexNet's first fully connected layer.
FC6 = LinearShape(inputs=9216, outputs=4096)
SPEEDS = FactorSpeeds(
    latency_s=1e-3,
    all_reduce_bytes_per_s=1e8,
    all_gather_bytes_per_s=5e7,
    product_flop_per_s=1e11,
)


def test_gradient_of_a_layer_has_weight_and_bias_divided_among_its_owners():
    assert FC6.gradient_bytes == 4 * 4096 * 9217
    assert LinearShape(inputs=3, outputs=8, has_bias=False).gradient_bytes == 4 * 8 * 3
    assert LinearShape(inputs=3, outputs=8, owners=2).gradient_bytes == 4 * 4 * 4


def test_factors_are_one_row_per_sample():
    assert FC6.factor_bytes(32, 4) == 32 * 13312 * 4
    assert FC6.factor_bytes(32, 2) == 32 * 13312 * 2


def test_all_reduce_sends_the_gradient_in_a_ring():
    sent = 4 * 4096 * 9217
    assert all_reduce_cost(FC6, 2, SPEEDS) == Cost(sent, sent / 1e8)
    assert all_reduce_cost(FC6, 4, SPEEDS) == Cost(1.5 * sent, 1.5 * sent / 1e8)


def test_factors_cost_two_messages_and_the_product_of_the_other_samples():
    sent = 32 * 13312 * 4
    flop = 2 * 32 * 9216 * 4096
    assert factor_cost(FC6, 32, 4, 2, SPEEDS) == Cost(sent, 2e-3 + sent / 5e7 + flop / 1e11)
    seconds = 6e-3 + 3 * sent / 5e7 + 3 * flop / 1e11
    assert factor_cost(FC6, 32, 4, 4, SPEEDS) == Cost(3 * sent, pytest.approx(seconds))


def test_owners_divide_the_gradient_but_not_the_factors():
    halves = LinearShape(inputs=9216, outputs=4096, owners=2)
    whole, half = all_reduce_cost(FC6, 2, SPEEDS), all_reduce_cost(halves, 2, SPEEDS)
    assert half.sent_bytes == whole.sent_bytes / 2
    # Half of the rows, over the samples of twice as many ranks.
    assert factor_cost(halves, 16, 4, 2, SPEEDS) == factor_cost(FC6, 16, 4, 2, SPEEDS)


def test_unmeasured_speeds_give_bytes_without_times():
    assert all_reduce_cost(FC6, 2, None) == Cost(4 * 4096 * 9217, None)
    assert factor_cost(FC6, 32, 4, 2, None) == Cost(32 * 13312 * 4, None)


def test_embedding_sends_an_index_and_a_row_for_each_position():
    table = EmbeddingShape(rows=30_000, outputs=768, positions=128)
    assert table.gradient_bytes == 4 * 30_000 * 768
    sent = 32 * 128 * (8 + 4 * 768)
    # bf16 changes nothing: the outputs of an embedding are float32
    for item_bytes in (2, 4):
        cost = factor_cost(table, 32, item_bytes, 2, SPEEDS)
        assert cost == Cost(sent, 2e-3 + sent / 5e7 + 32 * 128 * 768 / 1e11)
