"""What is shown of ranks with layers, experts or shards of their own, from fabricated records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.analysis.equivalence.fabricated_ranks import (
    NAMES,
    RANKS,
    a_pass,
    a_step,
    first,
    judged,
    mean,
    own,
    own_values,
    sketch_of,
    weights,
)

from paceline.analysis.equivalence.observed import LayoutFinding
from paceline.analysis.equivalence.ranks import Statement, judge_ranks
from paceline.analysis.equivalence.shown import shown
from paceline.measure.records.own_steps import (
    COMPRESSED,
    DIVIDED,
    Group,
    OwnGradient,
    OwnPass,
    OwnSteps,
    State,
    TensorPart,
    UsedGradient,
)


def test_experts_of_a_rank_are_not_shown_and_other_weights_of_its_own_are_wrong():
    def used(rank):
        return lambda name: own_values(name, rank) / 2 if name == "body.weight" else mean(name)

    def states(rank):
        body, head = weights()
        value = sketch_of(np.full(64, 1.0 + rank))
        return [replace(body, shape=[8, 8], value=value), replace(head, shape=[8, 8])]

    steps = [a_step(rank, used(rank), weights=states(rank)) for rank in range(RANKS)]
    for modules in (["body"], [""]):
        found = judged(*steps, exchanging=modules)
        assert found.statement == Statement.NOT_SHOWN
        assert "body.weight of their own, to which they send rows (expert parallel)" in first(found)
    assert judged(*steps, exchanging=["head"]).statement == Statement.WRONG
    assert judged(*steps).statement == Statement.WRONG


def test_parts_of_a_layer_may_begin_with_equal_numbers_where_all_rows_are_gathered_and_summed():
    def record(rank, **more):
        def used(name):
            return own_values(name, rank) if name == "head.weight" else mean(name)

        body, head = weights()
        after = [body, replace(head, value=sketch_of(np.full(64, 2.0 + rank)))]
        step = a_step(rank, used)
        return OwnSteps(steps=[step], after=after, counts=[1], optimizers=["SGD"], **more)

    def of(**more):
        return judge_ranks([record(rank, **more) for rank in range(RANKS)], 1)

    found = of(dividing=["head."])
    assert found.statement == Statement.NOT_SHOWN
    assert "head.weight of their own" in first(found)
    assert of(dividing=["head."], layout=[COMPRESSED]).statement == Statement.NOT_SHOWN
    assert of(dividing=["body."]).statement == Statement.WRONG
    assert of().statement == Statement.WRONG


def test_weights_that_drift_beside_divided_layers_are_explained_by_rows():
    found = judged(*(a_step(rank, mean) for rank in range(RANKS)), drift=0.1, layout=[DIVIDED])
    assert found.statement == Statement.WRONG
    assert "ranks that divide layers need the same rows, and have others" in first(found)


def test_local_sgd_and_compressed_gradients_are_not_shown():
    records = [
        OwnSteps(
            steps=[
                a_step(r, lambda n, r=r: own_values(n, r)),
                a_step(r, lambda n, r=r: own_values(n, r), step=1, weights=weights(r)),
            ],
            after=weights(),
            counts=[2],
            optimizers=["SGD"],
        )
        for r in range(RANKS)
    ]
    found = judge_ranks(records, 2)
    assert found.statement == Statement.NOT_SHOWN
    assert "average their weights after some steps" in first(found)
    steps = [a_step(r, lambda n, r=r: own_values(n, r)) for r in range(RANKS)]
    later = [
        judge_ranks(
            [
                OwnSteps(
                    steps=[steps[r]],
                    after=weights(r),
                    marks=m(r),
                    counts=[9],
                    optimizers=["SGD"],
                )
                for r in range(RANKS)
            ],
            1,
        )
        for m in (lambda r: [r, r + 2, 4], lambda r: [4, r + 2])
    ]
    assert [each.statement for each in later] == [Statement.NOT_SHOWN, Statement.WRONG]
    layout = [COMPRESSED]
    steps = [a_step(r, lambda n: own_values(n, 7)) for r in range(RANKS)]
    assert judged(*steps, layout=layout).statement == Statement.NOT_SHOWN


def stage(rank, **more):
    name = NAMES[rank]
    value = sketch_of(own_values(name, rank))
    used = [UsedGradient(place=TensorPart(name=name), value=value)]
    fields = {
        "weights": [each for each in weights() if each.place.name == name],
        "own": [own(name, rank)],
        "groups": [Group(names=[name], options={"lr": 0.1})],
        "has_messages": True,
    }
    return replace(a_step(rank, mean, **{**fields, **more}), used=used)


def test_ranks_with_layers_of_their_own_are_stages():
    stages = judged(*(stage(rank) for rank in range(RANKS)))
    assert stages.statement == Statement.NOT_SHOWN
    assert [each.reason for each in stages.findings] == ["ranks have different layers (pipeline)"]
    tied = State(place=TensorPart(name="tied"), shape=[64], value=sketch_of(np.full(64, 3.0)))
    shared = [stage(r, weights=[*stage(r).weights, tied]) for r in range(RANKS)]
    found = judged(*shared)
    assert "ranks have different layers (pipeline)" in first(found)
    equal = shown(LayoutFinding(passed=True, reason="1 step agrees"), found)
    assert equal.statement == Statement.EQUAL
    passes = replace(stage(1), passes=[a_pass(7)])
    assert judged(stage(0), passes).statement == Statement.NOT_SHOWN


def flat_step(rank, step, factor):
    """A step of a half of the flat weights; its gradient is a multiple of the mean's half."""
    place = TensorPart(name="group0.parameter0")
    whole = np.concatenate([mean(name) for name in NAMES])
    half = factor * np.split(whole, RANKS)[rank] * (1 + step)
    part = State(place=place, shape=[64], value=sketch_of(np.full(64, float(rank + step))))
    own_ones = [
        OwnGradient(
            place=TensorPart(name=n),
            passes=[
                OwnPass(number=0, fresh=True, first=sketch_of((1 + step) * own_values(n, rank)))
            ],
        )
        for n in NAMES
    ]
    used = [UsedGradient(place=place, value=sketch_of(half))]
    both = [*weights(float(step)), part]
    return replace(a_step(rank, mean, step=step, weights=both, own=own_ones), used=used)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_sum_of_shards_shows_whether_gradients_were_averaged(factor):
    records = [
        OwnSteps(
            steps=[flat_step(rank, step, factor) for step in range(2)],
            counts=[2],
            optimizers=["AdamW"],
        )
        for rank in range(RANKS)
    ]
    found = judge_ranks(records, 2)
    assert found.statement == (Statement.NOT_SHOWN if factor == 1 else Statement.WRONG)
    assert factor == 1 or first(found) == "gradients are summed over 2 ranks instead of averaged"


def test_optimisers_that_step_parts_of_a_flat_copy_are_not_shown():
    def shard(rank, step):
        place = TensorPart(name="group0.parameter0")
        part = State(place=place, shape=[64], value=sketch_of(np.full(64, rank + step)))
        used = UsedGradient(place=place, value=sketch_of(own_values("body.weight", rank)))
        step_of_rank = a_step(rank, mean, step=step, weights=[*weights(step), part])
        return replace(step_of_rank, used=[used])

    def records(of_rank):
        return [
            OwnSteps(
                steps=[shard(rank, 0), replace(shard(rank, 1), weights=of_rank(rank))],
                counts=[2],
                optimizers=["AdamW"],
            )
            for rank in range(RANKS)
        ]

    found = judge_ranks(records(lambda _rank: weights(2.0)), 2)
    assert found.statement == Statement.NOT_SHOWN
    assert "divided by hand" in first(found)
    found = judge_ranks(records(weights), 2)
    assert found.statement == Statement.WRONG
    assert first(found) == "body.weight, head.weight of rank 1 is no longer that of rank 0"


def test_weights_that_differ_beside_equal_ones_may_be_those_of_divided_layers():
    def step(rank, names):
        first = [
            replace(each, value=sketch_of(np.full(64, 2.0 + rank * (each.place.name in names))))
            for each in weights()
        ]
        return a_step(rank, mean, weights=[replace(each, shape=[8, 8]) for each in first])

    every = judged(*(step(rank, NAMES) for rank in range(RANKS)))
    assert first(every).endswith("let rank 0 send its weights")
    some = judged(*(step(rank, NAMES[:1]) for rank in range(RANKS)))
    assert first(some).endswith("where ranks divide these layers, all of them need the same rows")
