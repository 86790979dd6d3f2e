"""Gradients of several losses of the same rows, which a script combines, made up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from tests.unit.analysis.equivalence.fabricated_ranks import (
    RANKS,
    a_step,
    first,
    judged,
    own_values,
    sketch_of,
)

from paceline.analysis.equivalence.ranks import Statement
from paceline.measure.records.own_steps import OwnGradient, OwnPass, TensorPart, UsedGradient


def two_losses(name, first=0.5, of_rank_1=1.0):
    """Gradients of two losses, exchanged each, and combined with weights of their own."""
    values = [[own_values(name, rank, number) for rank in range(RANKS)] for number in (0, 1)]
    (a, b), (c, d) = values
    return first * (a + of_rank_1 * b) / RANKS + (c + d) / RANKS


def of_one_forward(step, number=None):
    """The passes have the same rows; number: of all passes, as torch.autograd.grad has none."""
    rows = [replace(each, checksums=step.rows[0].checksums) for each in step.rows]
    if number is None:
        return replace(step, rows=rows)
    own = [
        replace(each, passes=[replace(p, number=number) for p in each.passes]) for each in step.own
    ]
    return replace(step, rows=rows[:1], own=own, passes=[])


@pytest.mark.parametrize("number", [None, 0])
def test_gradients_of_several_losses_may_be_combined(number):
    steps = [a_step(rank, two_losses, passes=2) for rank in range(RANKS)]
    assert judged(*steps).statement == Statement.WRONG  # passes of an accumulation
    found = judged(*(of_one_forward(each, number) for each in steps))
    assert found.statement == Statement.MEAN
    assert first(found) == (
        "the gradients of several losses are combined in that of body.weight, head.weight (0.5 : 1)"
    )
    unequal = partial(two_losses, of_rank_1=0.9)
    steps = [of_one_forward(a_step(rank, unequal, passes=2), number) for rank in range(RANKS)]
    assert judged(*steps).statement == Statement.WRONG


def test_a_small_tensor_has_the_weights_of_the_others():
    def short(step, rank):
        bias = TensorPart(name="bias")
        own = [
            OwnPass(
                number=p, fresh=not p, first=sketch_of(own_values("body.weight", rank, p)[:5] + 9)
            )
            for p in range(2)
        ]
        used = 0.99 * mean_of_short(0) + mean_of_short(1)
        return replace(
            step,
            own=[*step.own, OwnGradient(place=bias, passes=own)],
            used=[*step.used, UsedGradient(place=bias, value=sketch_of(used))],
        )

    def mean_of_short(number):
        return sum(own_values("body.weight", r, number)[:5] + 9 for r in range(RANKS)) / RANKS

    nearly = partial(two_losses, first=0.99)
    steps = [a_step(rank, nearly, passes=2) for rank in range(RANKS)]
    found = judged(*(of_one_forward(short(each, rank)) for rank, each in enumerate(steps)))
    assert [each.kind for each in found.findings if each.kind == "rounded"] == []
    assert "of bias, body.weight, head.weight (0.99 : 1)" in first(found)
