"""Faults of ranks that several steps show, from fabricated records."""

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
    term,
    weights,
)

from paceline.analysis.equivalence.ranks import Statement, judge_ranks
from paceline.measure.records.own_steps import (
    Group,
    LaterWeights,
    OwnGradient,
    OwnPass,
    OwnSteps,
    ReachedRows,
    State,
    TensorPart,
)


def with_former(used, **more):
    """The records of a right step and of one that follows it."""
    former = [a_step(rank, mean) for rank in range(RANKS)]

    def shifted(rank):
        return [
            replace(each, passes=[replace(e, first=sketch_of(moved)) for e in each.passes])
            for each in (own(name, rank) for name in NAMES)
            for moved in [own_values(each.place.name, rank + 7)]
        ]

    steps = [a_step(r, used(r), step=1, own=shifted(r), **more) for r in range(RANKS)]
    records = [
        OwnSteps(steps=[a, b], after=weights(), counts=[2], optimizers=["SGD"])
        for a, b in zip(former, steps, strict=True)
    ]
    return judge_ranks(records, 2)


def test_the_mean_of_the_step_before_is_found():
    found = with_former(lambda _rank: mean)
    assert (found.statement, found.findings[0].step) == (Statement.WRONG, 1)
    assert "is that of the step before" in first(found)
    found = with_former(lambda _rank: lambda name: mean(name) ** 3)
    assert (found.statement, found.findings[0].kind) == (Statement.NOT_SHOWN, "exchange")
    assert "no weighted sum" in first(found)


def test_ranks_that_begin_with_the_weights_of_one_lose_what_the_others_have_learnt():
    def alone(*keeps):
        steps = [
            [
                a_step(rank, lambda name, rank=rank: own_values(name, rank), step=step)
                for step in range(2)
            ]
            for rank in range(RANKS)
        ]
        for own_steps, kept in zip(steps, keeps, strict=True):
            own_steps[1].keeps_weights = kept
        records = [
            OwnSteps(steps=each, after=weights(), counts=[2], optimizers=["SGD"]) for each in steps
        ]
        return judge_ranks(records, 2)

    assert "begin the next step with the weights of rank 0" in first(alone(True, False))
    assert alone(True, False).statement == Statement.WRONG
    found = alone(False, False)
    assert (found.statement, found.findings[0].kind) == (Statement.NOT_SHOWN, "averaged")
    found = alone(True, True)
    assert (found.statement, found.findings[0].kind) == (Statement.NOT_SHOWN, "averaged")
    assert "exchanges inside of its step" in first(found)


def test_weights_and_rates_that_drift_apart_in_later_steps_are_found():
    def found(value, rate=0.1):
        records = [
            OwnSteps(
                steps=[a_step(rank, mean)],
                after=weights(),
                later=[
                    LaterWeights(
                        steps=8,
                        weights=weights(1.0 + rank * value),
                        groups=[Group(names=NAMES, options={"lr": rate if rank else 0.1})],
                    )
                ],
                counts=[9],
                optimizers=["SGD"],
            )
            for rank in range(RANKS)
        ]
        return judge_ranks(records, 1)

    assert found(1e-5).statement == Statement.DATA_PARALLEL  # rounding of many steps
    assert found(0.01).statement == Statement.WRONG
    assert [each.step for each in found(0.01).findings if each.level == "fault"] == [8]
    assert first(found(0.01, 0.05)) == "the learning rate of rank 1 is 0.05, of rank 0 0.1"
    assert found(0.0, 0.05).statement == Statement.WRONG


def own_of(name, rank, fresh):
    """Gradients of passes; fresh: whether each began with none."""
    passes = [
        OwnPass(number=p, fresh=each, first=sketch_of(own_values(name, rank, p)))
        for p, each in enumerate(fresh)
    ]
    return OwnGradient(place=TensorPart(name=name), passes=passes)


def test_a_rank_that_empties_its_gradients_between_passes_is_found():
    def used(name):
        return (own_values(name, 0) + own_values(name, 0, 1) + own_values(name, 1, 1)) / RANKS

    def step(rank, fresh, **more):
        own_ones = [own_of(name, rank, fresh) for name in NAMES]
        halves = [term(0.5, number=p) for p in range(2) if p >= fresh.count(True) - 1]
        return a_step(rank, used, passes=2, own=own_ones, **{"terms": halves, **more})

    found = judged(step(0, [True, False]), step(1, [True, True]))
    assert found.statement == Statement.WRONG
    assert "rank 1 steps with the gradients of 1 of its 2 backward passes" in first(found)
    # A test of rank 1 before the step is no pass that others add up.
    fine = [term(1.0, number=1)]
    alone = judged(
        a_step(0, lambda n: (own_values(n, 0) + own_values(n, 1, 1)) / RANKS),
        replace(
            a_step(1, lambda n: (own_values(n, 0) + own_values(n, 1, 1)) / RANKS),
            own=[own_of(name, 1, [True, True]) for name in NAMES],
            rows=[ReachedRows(number=1, call=0, module="Model", checksums=["a", "b"])],
            terms=fine,
        ),
    )
    assert alone.statement == Statement.DATA_PARALLEL


def test_other_numbers_of_passes_are_wrong_if_samples_have_other_weights():
    def used(name):
        return (
            sum(own_values(name, 0, p) for p in range(2))
            + sum(own_values(name, 1, p) for p in range(3))
        ) / RANKS

    def step(rank, passes, weight):
        return a_step(
            rank, used, passes=passes, terms=[term(weight, number=p) for p in range(passes)]
        )

    means = judged(step(0, 2, 1 / 2), step(1, 3, 1 / 3))
    assert means.statement == Statement.WRONG
    assert "different numbers of backward passes (2 on rank 0, 3 on rank 1)" in first(means)
    assert means.findings[0].factor == pytest.approx(1.5)
    sums = judged(step(0, 2, 2 / 5), step(1, 3, 2 / 5))
    assert (sums.statement, sums.findings) == (Statement.DATA_PARALLEL, ())
    other = judged(step(0, 2, 1 / 5), step(1, 3, 1 / 5))
    assert "the weights of all rows add up to 0.5" in first(other)


def second_step(rank, *, fresh, **more):
    return a_step(rank, mean, step=1, own=[own_of(n, rank, [fresh]) for n in NAMES], **more)


def of_two_steps(seconds, **more):
    return judge_ranks(
        [
            OwnSteps(
                steps=[a_step(r, mean), each],
                after=weights(),
                counts=[2],
                optimizers=["SGD"],
                **more,
            )
            for r, each in enumerate(seconds)
        ],
        2,
    )


def test_a_rank_that_keeps_gradients_of_the_step_before_is_found():
    both = of_two_steps([second_step(r, fresh=False) for r in range(RANKS)])
    assert not [each for each in both.findings if each.kind == "emptied"]
    found = of_two_steps([second_step(r, fresh=bool(r)) for r in range(RANKS)])
    assert found.statement == Statement.WRONG
    assert "rank 0 adds to the gradient of body.weight, head.weight of the step before" in first(
        found
    )


def test_updates_that_never_last_are_wrong():
    every = [second_step(r, fresh=True, lost=list(NAMES)) for r in range(RANKS)]
    found = of_two_steps(every)
    assert found.statement == Statement.WRONG
    assert first(found).startswith("the optimiser moves all weights, but before the next step")
    later = of_two_steps(every, marks=[1, 2])  # they change after some steps
    assert later.statement == Statement.DATA_PARALLEL
    some = of_two_steps([second_step(r, fresh=True, lost=NAMES[:1]) for r in range(RANKS)])
    assert some.statement == Statement.DATA_PARALLEL


def moment(value):
    place = TensorPart(name="exp_avg of head.weight")
    return State(place=place, shape=[64], value=sketch_of(np.full(64, value)))


@pytest.mark.parametrize(
    ("first_rank", "second_rank", "words"),
    [
        ([moment(1.0)], [moment(1.0)], None),
        ([moment(1.0)], [moment(1.0 + 1e-8)], None),
        ([moment(0.0)], [], None),
        ([moment(1.0)], [], "begins with exp_avg of head.weight, that of rank 1 without it"),
        ([moment(1.0)], [moment(2.0)], "that of rank 0 with another one"),
    ],
)
def test_optimisers_begin_with_equal_moments(first_rank, second_rank, words):
    found = judged(a_step(0, mean, moments=first_rank), a_step(1, mean, moments=second_rank))
    assert (found.statement == Statement.WRONG) == (words is not None)
    assert words is None or words in first(found)


def test_ranks_that_step_in_turns_are_not_compared():
    def records(keeps):
        found = []
        for rank in range(RANKS):
            steps = [
                replace(
                    a_step(rank, mean, step=step, weights=weights(1 + RANKS * step + rank)),
                    passes=[a_pass(RANKS * step + rank)],
                    keeps_weights=keeps and step > 0,
                )
                for step in range(2)
            ]
            found.append(OwnSteps(steps=steps, counts=[2], optimizers=["SGD"]))
        return found

    turns = judge_ranks(records(keeps=False), 2)
    assert turns.statement == Statement.NOT_SHOWN
    assert "in turns" in first(turns)
    assert judge_ranks(records(keeps=True), 2).statement == Statement.WRONG  # nobody sends weights
