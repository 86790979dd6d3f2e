"""Options of optimisers beside those of one process, from fabricated records."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.analysis.equivalence.fabricated_ranks import (
    RANKS,
    a_step,
    judged,
    mean,
)
from tests.unit.analysis.equivalence.test_observed import (
    ROUNDED,
    SAMPLES,
    one_process,
    ranks,
    tensors,
    update,
)

from paceline.analysis.equivalence.observed import judge
from paceline.analysis.equivalence.options import compared_options
from paceline.analysis.equivalence.own_checks import Level
from paceline.analysis.equivalence.ranks import Statement, judge_ranks
from paceline.measure.records.own_steps import ComparedTensor, Observed, OwnSteps, TrainedRows

RATE = 0.1


def observed(*rates, kind="SGD", **more):
    """One rank with these learning rates in its steps."""
    options = [{"lr": each, "weight_decay": 0.0, "momentum": 0.9, **more} for each in rates]
    return Observed(
        updates=[
            update(step, SAMPLES, kind=kind, options=[each]) for step, each in enumerate(options)
        ]
    )


def trained(of_rank, steps=2):
    """Rows of one process with 8 in a step, and of two ranks."""
    numbers = [[f"{rank}{place}" for place in range(of_rank)] for rank in (1, 2)]
    return (
        [TrainedRows.of([[f"{place}" for place in range(8)]] * steps, is_whole=True)],
        [TrainedRows.of([each] * steps, is_whole=True) for each in numbers],
    )


def compared(ours, of_rank=4, reference=None):
    found = compared_options([reference or observed(RATE, RATE)], [ours] * 2, trained(of_rank))
    return [(each.level, each.kind, each.step) for each in found.findings], found


def test_another_learning_rate_for_as_many_rows_is_a_fault_from_the_start():
    levels, found = compared(observed(2 * RATE, 2 * RATE))
    assert levels == [(Level.FAULT, "rate", 0)]
    assert found.findings[0].factor == pytest.approx(2)
    assert found.findings[0].reason == (
        "the learning rate is 0.2, 2 times that of one process, although a step has as many rows"
    )


def test_a_later_difference_may_follow_from_other_samples():
    levels, _ = compared(observed(RATE, RATE / 2))
    assert levels == [(Level.SUSPICION, "rate", 1)]


def test_the_learning_rate_of_more_rows_is_named():
    levels, found = compared(observed(2 * RATE, 2 * RATE), of_rank=8)
    assert levels == [(Level.REMARK, "rate", 0)]
    assert found.findings[0].reason.endswith("; a step has 16 rows, there 8")
    assert not found.scales


def test_unknown_rows_decide_nothing():
    found = compared_options([observed(RATE)], [observed(2 * RATE)] * 2)
    assert [each.level for each in found.findings] == [Level.REMARK]
    assert not found.scales


def test_each_other_option_is_named():
    levels, found = compared(observed(RATE, RATE, weight_decay=0.1, momentum=0.5))
    assert sorted(levels) == [
        (Level.FAULT, "option momentum", 0),
        (Level.FAULT, "option weight_decay", 0),
    ]
    assert "weight_decay is 0.1, in one process 0.0" in " ".join(e.reason for e in found.findings)


def test_equal_options_and_unequal_ranks_are_not_named():
    assert compared(observed(RATE, RATE)) == ([], compared_options([], []))
    own = [observed(RATE), observed(2 * RATE)]  # a finding of the ranks by themselves
    assert not compared_options([observed(RATE)], own, trained(4)).findings


@pytest.mark.parametrize(
    ("more", "known"),
    [
        ({}, True),
        ({"kind": "Adam"}, False),
        ({"weight_decay": 0.1}, False),
        ({"momentum": 0.5}, False),
    ],
)
def test_only_linear_steps_have_a_scale(more, known):
    reference = observed(RATE, RATE, **{k: v for k, v in more.items() if k != "momentum"})
    _, found = compared(observed(RATE / 2, RATE / 2, **more), reference=reference)
    assert dict(found.scales) == ({(0, 0): 0.5, (0, 1): 0.5} if known else {})


def summed(rate, kind="SGD"):
    """Two ranks that use the sum of their gradients, and their records beside one process."""
    own = [observed(rate, kind=kind)] * RANKS
    options = compared_options([observed(RATE, kind=kind)], own, trained(4, steps=1))
    steps = [a_step(rank, lambda name: RANKS * mean(name)) for rank in range(RANKS)]
    records = [OwnSteps(steps=[e], counts=[1], optimizers=[kind]) for e in steps]
    return judge_ranks(records, 1, options=options)


def test_a_learning_rate_makes_up_for_a_sum():
    found = summed(RATE / RANKS)
    assert found.statement == Statement.DATA_PARALLEL
    [finding] = found.findings
    assert finding.reason == (
        "the weights of all rows add up to 2, and the learning rate is 0.5 times that of the "
        "reference, which makes the same step"
    )


@pytest.mark.parametrize(("rate", "kind"), [(RATE, "SGD"), (RATE / 4, "SGD"), (RATE / 2, "Adam")])
def test_another_learning_rate_or_optimiser_does_not(rate, kind):
    found = summed(rate, kind)
    assert found.statement == Statement.WRONG
    assert any("summed over 2 ranks" in each.reason for each in found.findings)


def test_the_rate_of_a_mean_is_the_cause():
    own = [observed(2 * RATE)] * RANKS
    options = compared_options([observed(RATE)], own, trained(4, steps=1))
    records = [
        OwnSteps(steps=[a_step(rank, mean)], counts=[1], optimizers=["SGD"])
        for rank in range(RANKS)
    ]
    found = judge_ranks(records, 1, options=options)
    assert found.statement == Statement.WRONG
    assert found.findings[0].kind == "rate"
    assert judged(*(a_step(rank, mean) for rank in range(RANKS))).statement == 2


def beside_one_process(change_factor):
    options = {"options": [{"lr": RATE, "weight_decay": 0.0}], "kind": "SGD"}
    half = {"options": [{"lr": RATE / 2, "weight_decay": 0.0}], "kind": "SGD"}
    changes = {"gradient": tensors(factor=2.0), "change": tensors(factor=change_factor), **half}
    return judge([one_process(**options)], [ROUNDED], ranks(changes), trained(4))


def test_weights_decide_whether_a_rate_makes_up_for_gradients():
    assert beside_one_process(1.0).passed is True
    found = beside_one_process(0.5)
    assert (found.passed, found.kind) == (False, "update")


def test_times_gives_the_difference_of_a_multiple():
    tensor = ComparedTensor(name="w", l2=2.0, difference_l2=2.0, factor=2.0)
    assert tensor.times(1) == tensor
    half = tensor.times(0.5)
    assert half.difference_l2 == pytest.approx(0)
    assert half.factor == pytest.approx(1)
    across = replace(tensor, factor=1.0)  # a difference at right angles to the reference
    assert across.times(0.5).difference_l2 == pytest.approx((1 + 1) ** 0.5)
    nothing = ComparedTensor(name="w", l2=0.0, difference_l2=3.0)
    assert nothing.times(0.5).difference_l2 == pytest.approx(1.5)
