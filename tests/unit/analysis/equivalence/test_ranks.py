"""The judgement of ranks against each other, from fabricated records."""

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
    of_both,
    own_values,
    sketch_of,
    term,
    weights,
)

from paceline.analysis.equivalence.observed import LayoutFinding
from paceline.analysis.equivalence.ranks import Statement, judge_ranks
from paceline.analysis.equivalence.shown import shown
from paceline.measure.records.own_steps import (
    Group,
    OwnGradient,
    OwnPass,
    OwnSteps,
    ReachedRows,
    TensorPart,
    UsedGradient,
)


def test_the_mean_of_all_rows_is_a_data_parallel_step():
    found = of_both()
    assert (found.statement, found.findings, found.rows) == (Statement.DATA_PARALLEL, (), (8, 8))


def test_a_mean_of_other_order_is_rounding_however_small_it_is():
    # Own gradients that cancel leave a mean that is nothing but roundings.
    def cancels(name, rank):
        values = own_values(name, 0) * (1 if rank == 0 else -1 + 1e-7)
        passes = [OwnPass(number=0, fresh=True, first=sketch_of(values))]
        return OwnGradient(place=TensorPart(name=name), passes=passes)

    def noise(name):
        return own_values(name, 1) * 1e-7

    found = judged(
        *(a_step(rank, noise, own=[cancels(n, rank) for n in NAMES]) for rank in range(RANKS))
    )
    assert not [each for each in found.findings if each.level == "fault"]


@pytest.mark.parametrize(
    ("used", "factor", "words"),
    [
        (lambda name: 2 * mean(name), 2.0, "summed over 2 ranks"),
        (lambda name: mean(name) / 2, 0.5, "divided by 2 once too often"),
    ],
)
def test_a_sum_is_not_the_mean(used, factor, words):
    found = of_both(used)
    assert found.statement == Statement.WRONG
    assert (found.findings[0].factor, found.findings[0].step) == (factor, 0)
    assert words in first(found)


def test_a_sum_is_not_the_mean_of_a_loss_with_a_minus():
    # Such as the mean of negative log-probabilities.
    assert of_both(terms=[term(-1.0)]).findings == ()
    found = of_both(lambda name: 2 * mean(name), terms=[term(-1.0)])
    assert "summed over 2 ranks" in first(found)


def test_a_sum_of_several_numbers_of_each_row_may_be_divided_by_the_rows():
    a_sum = {"kind": "SumBackward0", "is_mean": False, "elements": 40.0}  # of 8 rows
    assert of_both(terms=[term(1 / 8, **a_sum)]).findings == ()
    assert of_both(terms=[term(1 / 40, **a_sum)]).findings == ()
    found = of_both(lambda name: 2 * mean(name), terms=[term(1 / 8, **a_sum)])
    assert "summed over 2 ranks" in first(found)
    assert of_both(terms=[term(1 / 10, **a_sum)]).statement == Statement.MEAN


def test_a_sum_of_weighted_rows_may_be_divided_by_the_rows():
    # Such as the loss of a diffusion model, which counts each row by its noise.
    a_sum = {"kind": "SumBackward0", "is_mean": False, "elements": 23.4, "numbers": 40.0}
    of_rows = [term(1 / 16, number=p, **a_sum) for p in range(2)]
    for gradient in (1 / 8, 1 / 40, 1 / 23.4):
        assert of_both(terms=[term(gradient, **a_sum)]).findings == ()
    accumulated = of_both(lambda n: mean(n, 2), passes=2, terms=of_rows)
    assert accumulated.findings == ()
    assert of_both(terms=[term(1 / 9, **a_sum)]).statement == Statement.MEAN


def test_a_sum_may_be_divided_by_nearly_the_number_of_its_elements():
    # Such as by all labels of sentences, of which the loss leaves out the first ones.
    a_sum = {"kind": "NllLossBackward0", "is_mean": False, "elements": 40.0}
    found = of_both(terms=[term(1 / 42, **a_sum)])
    assert (found.statement, first(found)) == (2, "the weights of all rows add up to 0.952")
    passes = [term(1 / 84, number=p, **a_sum) for p in range(2)]
    accumulated = of_both(lambda n: mean(n, 2), passes=2, terms=passes)
    assert (accumulated.statement, first(accumulated)) == (2, first(found))
    for wrong in (1 / 60, 1 / 20):
        assert of_both(terms=[term(wrong, **a_sum)]).statement > Statement.DATA_PARALLEL
    half = [term(1 / 160, number=p, **a_sum) for p in range(2)]
    assert of_both(lambda n: mean(n, 2), passes=2, terms=half).is_suspicious


@pytest.mark.parametrize("passes", [1, 2])
def test_a_sum_may_be_computed_in_parts(passes):
    # Such as a cross entropy over parts of the words of a batch, to save memory.
    def parts(gradient):
        a_sum = {"kind": "NllLossBackward0", "is_mean": False, "elements": 5.0}
        return [term(gradient, number=p, **a_sum) for p in range(passes) for _ in range(8)]

    def of(times, gradient):
        return of_both(lambda n: times * mean(n, passes), passes=passes, terms=parts(gradient))

    assert of(1, 1 / 40 / passes).findings == ()
    assert of(2 / 40 / passes, 1 / 2).findings == ()  # divided after the pass
    assert of(1, 1 / 8).statement == Statement.MEAN


def test_an_optimiser_that_steps_none_of_the_weights_with_a_gradient_is_wrong():
    steps = [replace(a_step(rank, mean), used=[]) for rank in range(RANKS)]
    found = judged(*steps)
    assert (found.statement, found.findings[0].kind) == (Statement.WRONG, "unstepped")
    agrees = LayoutFinding(passed=True, reason="1 steps agree", steps=1)
    assert shown(agrees, found).findings[0].kind == "unstepped"
    moving = judged(*steps, moved=0.5)
    assert moving.statement == Statement.NOT_SHOWN


def test_a_sum_is_right_if_the_loss_is_divided_by_the_ranks():
    found = of_both(lambda name: 2 * mean(name), terms=[term(0.5)])
    assert found.statement == Statement.DATA_PARALLEL


def test_a_tensor_that_is_not_exchanged_is_named():
    def used(rank):
        return lambda name: own_values(name, rank) if name == "head.weight" else mean(name)

    steps = [a_step(rank, used(rank)) for rank in range(RANKS)]
    found = judged(*steps, drift=0.1)
    assert found.statement == Statement.WRONG
    assert first(found) == ("the gradient of head.weight is not exchanged: each rank uses its own")
    found = judged(*steps)
    assert found.statement == Statement.NOT_SHOWN
    assert "the gradient of head.weight is each rank's own before the step" in first(found)


def test_gradients_that_ranks_scale_before_the_exchange_are_found():
    found = of_both(lambda name: (own_values(name, 0) + 3 * own_values(name, 1)) / 2)
    assert "unequal weights in the mean: 1 (rank 0), 3 (rank 1)" in first(found)


def test_ranks_that_scale_the_mean_alone_are_found():
    found = judged(a_step(0, mean), a_step(1, lambda name: mean(name) / 4))
    assert "differently: 1 on rank 0, 0.25 on rank 1" in first(found)


def test_one_term_that_ranks_weigh_unequally_is_found_behind_others_that_may_be_samples():
    def terms(elements):
        pair = [term(elements=elements) for _ in range(2)]  # each may be one sample
        return [*pair, term(elements=elements / 2, kind="BinaryCrossEntropyWithLogitsBackward0")]

    steps = [a_step(rank, mean, terms=terms(8.0 + 4 * rank)) for rank in range(RANKS)]
    found = judged(*steps)
    assert found.statement == Statement.WRONG
    assert "mean of its own 4 and 6 elements (BinaryCrossEntropyWithLogits)" in first(found)


def test_passes_over_the_same_rows_may_be_divided_by_their_number_too():
    def both(other="MseLossBackward0"):
        terms = [term(1.0, number=0), term(1.0, number=1, kind=other)]
        steps = []

        def half_mean(name):
            return mean(name, 2) / 2

        for rank in range(RANKS):
            rows = [
                ReachedRows(number=p, call=p, module="Model", checksums=[f"a{rank}", f"b{rank}"])
                for p in range(2)
            ]
            steps.append(a_step(rank, half_mean, passes=2, rows=rows, terms=terms))
        return judged(*steps)

    assert both().statement == Statement.DATA_PARALLEL
    of_two_losses = both("NllLossBackward0")
    assert "divided by 2 once too often" in first(of_two_losses)


@pytest.mark.parametrize(("leaves_out", "statement"), [(False, 3), (True, 5)])
def test_rows_of_another_size_on_each_rank_have_equal_weights(leaves_out, statement):
    def step(rank):
        return a_step(rank, mean, terms=[term(elements=80.0 + 16 * rank, leaves_out=leaves_out)])

    found = judged(*map(step, range(RANKS)))
    assert found.statement == statement
    assert "80 and 96 elements" in first(found)


def test_passes_must_be_exchanged_divided_and_equal():
    assert of_both(lambda n: mean(n, 2), passes=2).statement == Statement.DATA_PARALLEL
    whole = [term(1.0, number=p) for p in range(2)]
    found = of_both(lambda n: mean(n, 2), passes=2, terms=whole)
    assert "2 accumulated passes are not divided" in first(found)

    def second_alone(rank):
        return lambda name: mean(name) + own_values(name, rank, 1)

    found = judged(*(a_step(rank, second_alone(rank), passes=2) for rank in range(RANKS)))
    assert "is not exchanged in pass 2" in first(found)
    twice = of_both(lambda n: mean(n) + mean(n, 2), passes=2)
    assert "unequal weights in the gradient of body.weight, head.weight (2 : 1)" in first(twice)


def test_two_terms_of_one_loss_need_no_division():
    passes = [replace(a_pass(p), site=f"train.py:{p}") for p in range(2)]
    whole = [term(1.0, number=p) for p in range(2)]
    found = of_both(lambda n: mean(n, 2), passes=2)
    two = judged(
        *(
            replace(a_step(rank, lambda n: mean(n, 2), passes=2), terms=whole, passes=passes)
            for rank in range(RANKS)
        )
    )
    assert (found.statement, two.statement) == (Statement.DATA_PARALLEL,) * 2


@pytest.mark.parametrize("sites", [("train.py:9",) * 2, ("train.py:9", "train.py:12")])
def test_passes_that_are_divided_by_those_of_all_ranks_are_a_suspicion(sites):
    passes = [replace(a_pass(p), site=site) for p, site in enumerate(sites)]
    quarters = [term(1 / 4, number=p) for p in range(2)]
    found = judged(
        *(
            replace(a_step(rank, lambda n: mean(n, 2), passes=2), terms=quarters, passes=passes)
            for rank in range(RANKS)
        )
    )
    assert (found.statement, found.is_suspicious) == (Statement.MEAN, True)
    assert "of 2 passes add up to 1/2" in first(found)


def test_unequal_shares_have_unequal_weights():
    found = judged(a_step(0, mean), a_step(1, mean, terms=[term(elements=4.0)]))
    assert found.statement == Statement.WRONG
    assert "its own 8 and 4 elements (MSE)" in first(found)
    not_linear = judged(
        a_step(0, mean, terms=[term(is_linear=False)]),
        a_step(1, mean, terms=[term(0.5, is_linear=False)]),
    )
    assert not_linear.statement == Statement.MEAN


def test_equal_rows_are_wrong_and_shared_ones_are_not_known_to_be():
    rows = [ReachedRows(number=0, call=0, module="Model", checksums=["a", "b"])]
    other = [ReachedRows(number=0, call=0, module="Model", checksums=["b", "c"])]
    same = judged(a_step(0, mean, rows=rows), a_step(1, mean, rows=rows))
    shared = judged(a_step(0, mean, rows=rows), a_step(1, mean, rows=other))
    unknown = judged(a_step(0, mean, rows=[]), a_step(1, mean, rows=[]))
    assert (same.statement, first(same)) == (Statement.WRONG, "all ranks train on the same rows")
    assert {shared.statement, unknown.statement} == {Statement.MEAN}


def test_a_layer_that_is_newer_than_the_wrapper_is_neither_equal_nor_exchanged():
    def used(rank):
        return lambda name: own_values(name, rank) if name == "head.weight" else mean(name)

    def states(rank):
        body, head = weights()
        return [body, replace(head, value=sketch_of(np.full(64, 1.0 + rank)))]

    found = judged(*(a_step(rank, used(rank), weights=states(rank)) for rank in range(RANKS)))
    assert first(found) == (
        "head.weight of rank 1 differs from that of rank 0 before the first step: its gradient is "
        "not exchanged either, so it may be newer than the wrapper"
    )


def test_weights_groups_and_numbers_of_steps_must_be_equal():
    start = judged(a_step(0, mean), a_step(1, mean, weights=weights(1.5)))
    assert "of rank 1 differs from that of rank 0 before the first step" in first(start)
    groups = [Group(names=list(NAMES), options={"lr": 0.2})]
    rates = judged(a_step(0, mean), a_step(1, mean, groups=groups))
    assert first(rates) == "the learning rate of rank 1 is 0.2, of rank 0 0.1"
    assert rates.findings[0].factor == pytest.approx(2)
    records = [OwnSteps(steps=[a_step(r, mean)], counts=[1 + r]) for r in range(RANKS)]
    assert "rank 1 takes 2 steps, rank 0 takes 1" in first(judge_ranks(records, 4))


def test_zero_gradients_show_nothing_even_if_one_process_has_them_too():
    nothing = [
        OwnGradient(
            place=TensorPart(name=n),
            passes=[OwnPass(number=0, fresh=True, first=sketch_of(np.zeros(64)))],
        )
        for n in NAMES
    ]
    found = of_both(lambda _: np.zeros(64), own=nothing)
    assert found.statement == Statement.NOT_SHOWN
    assert shown(LayoutFinding(passed=True, reason=""), found).statement == Statement.NOT_SHOWN


def test_gradients_that_are_not_finite_are_no_evidence_of_a_missing_exchange():
    not_finite = replace(sketch_of(np.zeros(64)), l2=-1.0)
    steps = [
        replace(
            a_step(rank, mean),
            own=[
                OwnGradient(
                    place=TensorPart(name=n),
                    passes=[OwnPass(number=0, fresh=True, first=not_finite)],
                )
                for n in NAMES
            ],
            used=[UsedGradient(place=TensorPart(name=n), value=not_finite) for n in NAMES],
        )
        for rank in range(RANKS)
    ]
    found = judged(*steps)
    assert found.statement == Statement.NOT_SHOWN
    assert first(found) == "the gradient of body.weight, head.weight is not finite"


def test_a_gradient_that_all_gather_loses_is_a_suspicion():
    found = of_both(gathered=["all_gather"])
    assert (found.statement, found.is_suspicious) == (Statement.MEAN, True)


def test_a_gradient_that_all_reduce_loses_is_a_suspicion_where_ranks_have_rows_of_their_own():
    found = of_both(gathered=["all_reduce"])
    assert (found.statement, found.is_suspicious) == (Statement.MEAN, True)
    assert "which torch.distributed.all_reduce loses" in first(found)
    assert not of_both(gathered=["all_reduce"], rows=[]).is_suspicious


def test_a_loss_that_multiplies_rows_is_no_mean_over_them():
    found = of_both(mixes_rows=True)
    assert (found.statement, found.is_suspicious) == (Statement.MEAN, False)
    assert "combines rows with each other" in first(found)


def test_terms_that_share_rows_in_other_parts_on_each_rank_have_equal_weights_together():
    def terms(part, **more):
        return [term(part), term(1 - part, **more)]

    found = judged(*(a_step(r, mean, terms=terms(0.3 + 0.2 * r)) for r in range(RANKS)))
    assert (found.statement, found.is_suspicious) == (Statement.MEAN, False)
    assert "share the rows in other parts on each rank" in first(found)
    other = {"kind": "NllLossBackward0"}
    found = judged(*(a_step(r, mean, terms=terms(0.3 + 0.2 * r, **other)) for r in range(RANKS)))
    assert "unequal weights" in first(found)
    found = judged(*(a_step(r, mean, terms=[term(1.0 + r), term(1.0)]) for r in range(RANKS)))
    assert "unequal weights" in first(found)


def test_gradients_that_each_rank_changes_in_its_own_way_are_found():
    def noisy(rank):
        return lambda name: mean(name) + (1 + rank) * np.sin(mean(name))

    steps = [a_step(rank, noisy(rank)) for rank in range(RANKS)]
    found = judged(*steps, drift=0.1)
    assert (found.statement, found.findings[0].kind) == (Statement.WRONG, "exchange")
    assert "each rank changes the gradient of body.weight, head.weight by itself" in first(found)
    assert judged(*steps).statement == Statement.NOT_SHOWN  # the optimiser may exchange


def test_ranks_that_limit_values_of_their_own_gradient_are_found():
    def clipped(values):
        return np.clip(values, -0.3, 0.3)

    def both(before):
        steps = []
        for rank in range(RANKS):
            used = [
                UsedGradient(
                    place=TensorPart(name=name),
                    value=sketch_of(
                        sum(clipped(own_values(name, r)) for r in range(RANKS)) / RANKS
                    ),
                    before_clip=sketch_of(before(name, rank)),
                )
                for name in NAMES
            ]
            steps.append(replace(a_step(rank, mean), used=used))
        return judged(*steps)

    found = both(own_values)
    assert (found.statement, found.findings[0].kind) == (Statement.WRONG, "exchange")
    assert "each rank clips its own gradient of body.weight, head.weight before" in first(found)
    assert both(lambda name, _rank: mean(name)).statement == Statement.DATA_PARALLEL


def test_gradients_that_are_clipped_before_they_are_unscaled_are_a_remark_or_the_cause():
    ranks = of_both(clipped_scale=1024.0)
    assert (ranks.statement, len(ranks.findings)) == (Statement.DATA_PARALLEL, 1)
    assert "clipped while they are scaled by 1024" in first(ranks)
    differs = LayoutFinding(passed=False, kind="gradient", reason="differs", step=0)
    found = shown(differs, ranks)
    assert (found.statement, found.findings[0].kind) == (Statement.WRONG, "clipped-scaled")


def test_a_mean_that_one_rank_alone_uses_is_a_fault():
    found = judged(
        a_step(0, mean), a_step(1, lambda name: own_values(name, 0) * 0.2 + own_values(name, 1))
    )
    assert found.statement == Statement.WRONG
    assert first(found) == "only rank 0 uses the mean of the gradients of body.weight, head.weight"


def test_nearly_equal_weights_of_ranks_are_no_rounding_where_they_explain_the_mean_exactly():
    def clipped(name):
        return (own_values(name, 0) + 1.02 * own_values(name, 1)) / 2

    found = of_both(clipped)
    assert found.statement == Statement.WRONG
    assert "unequal weights in the mean" in first(found)


def test_a_norm_before_the_exchange_that_clips_nothing_is_right():
    def step(rank):
        found = a_step(rank, mean)
        used = [
            replace(each, before_clip=sketch_of(own_values(each.place.name, rank)))
            for each in found.used
        ]
        return replace(found, used=used)

    found = judged(*map(step, range(RANKS)))
    assert (found.statement, found.findings) == (Statement.DATA_PARALLEL, ())
