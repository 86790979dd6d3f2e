"""The judgement of ranks against each other, from fabricated records."""

from __future__ import annotations

import base64
import zlib
from dataclasses import replace

import numpy as np
import pytest

from paceline.analysis.equivalence.observed import LayoutFinding
from paceline.analysis.equivalence.ranks import Statement, judge_ranks
from paceline.analysis.equivalence.shown import shown
from paceline.measure.records.own_steps import (
    COMPRESSED,
    DIVIDED,
    BackwardPass,
    Group,
    LaterWeights,
    LossTerm,
    OwnGradient,
    OwnPass,
    OwnStep,
    OwnSteps,
    ReachedRows,
    Sketch,
    State,
    TensorPart,
    UsedGradient,
)

NAMES = ("body.weight", "head.weight")
RANKS = 2


def sketch_of(values):
    raw = np.asarray(values, "<f4").tobytes()
    return Sketch(
        numbers=base64.b64encode(raw).decode(),
        l2=float(np.linalg.norm(values)),
        crc32=zlib.crc32(raw),
        total=float(np.sum(values)),
    )


def own_values(name, rank, number=0):
    return np.random.default_rng([NAMES.index(name), rank, number]).normal(size=64)


def mean(name, passes=1):
    return sum(own_values(name, r, p) for r in range(RANKS) for p in range(passes)) / RANKS


def a_pass(number=0, loss=1.0):
    return BackwardPass(number=number, site="train.py:9", loss=loss)


def term(gradient=1.0, elements=8.0, number=0, **more):
    fields = {"kind": "MseLossBackward0", "is_mean": True, "is_linear": True, **more}
    return LossTerm(number=number, elements=elements, gradient=gradient, **fields)


def own(name, rank, passes=1):
    return OwnGradient(
        place=TensorPart(name=name),
        passes=[
            OwnPass(number=p, fresh=p == 0, first=sketch_of(own_values(name, rank, p)))
            for p in range(passes)
        ],
    )


def weights(value=1.0):
    return [
        State(place=TensorPart(name=name), shape=[64], value=sketch_of(np.full(64, value)))
        for name in NAMES
    ]


def a_step(rank, used, *, passes=1, step=0, **more):
    """used: of a tensor's name, the gradient that the optimiser uses."""
    rows = [
        ReachedRows(
            number=p, call=p, module="Model", checksums=[f"{rank}-{p}-{row}" for row in range(8)]
        )
        for p in range(passes)
    ]
    fields = {
        "weights": weights(),
        "own": [own(name, rank, passes) for name in NAMES],
        "used": [
            UsedGradient(place=TensorPart(name=name), value=sketch_of(used(name))) for name in NAMES
        ],
        "groups": [Group(names=list(NAMES), options={"lr": 0.1})],
        "rows": rows,
        "terms": [term(1 / passes, number=p) for p in range(passes)],
        "passes": [a_pass(p) for p in range(passes)],
    }
    return OwnStep(step=step, optimizer=0, **{**fields, **more})


def judged(*steps, drift=0.0, moved=0.0, **more):
    """Judge a training of one step for each rank.

    drift: of the weights after it, per rank. moved: by the step, on all ranks.
    """
    records = [
        OwnSteps(
            steps=[each],
            after=weights(1 + moved + rank * drift),
            counts=[1],
            optimizers=["SGD"],
            **more,
        )
        for rank, each in enumerate(steps)
    ]
    return judge_ranks(records, 1)


def of_both(used=mean, **more):
    return judged(*(a_step(rank, used, **more) for rank in range(RANKS)))


def first(found):
    return found.findings[0].reason


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
    assert "the optimiser exchanges the gradient of head.weight itself" in first(found)


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


def test_gradients_that_were_not_seen_may_be_equal_to_those_of_one_process():
    agrees = LayoutFinding(passed=True, reason="1 steps agree", steps=1)
    unseen = judged(*(replace(a_step(rank, mean), own=[]) for rank in range(RANKS)))
    assert unseen.statement == Statement.NOT_SHOWN
    assert shown(agrees, unseen).statement == Statement.EQUAL
    nothing = judged(*(replace(a_step(rank, mean), own=[], used=[]) for rank in range(RANKS)))
    assert shown(agrees, nothing).statement == Statement.NOT_SHOWN


def test_weights_that_drift_beside_divided_layers_are_explained_by_rows():
    found = judged(*(a_step(rank, mean) for rank in range(RANKS)), drift=0.1, layout=[DIVIDED])
    assert found.statement == Statement.WRONG
    assert "ranks that divide layers need the same rows, and have others" in first(found)


def test_other_terms_on_ranks_are_the_cause_of_another_gradient_than_that_of_one_process():
    differs = LayoutFinding(passed=False, kind="gradient", reason="all modules agree", step=0)
    terms = [term(), term(kind="SumBackward0", is_mean=False)]
    ranks = judged(a_step(0, mean, terms=terms), a_step(1, mean))
    found = shown(differs, ranks)
    assert (ranks.statement, found.statement) == (Statement.MEAN, Statement.WRONG)
    assert found.findings[0].reason == "the losses of ranks have different terms"


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


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_loss_that_combines_rows_may_have_another_gradient_in_one_process(kind):
    found = of_both(mixes_rows=True)
    differs = LayoutFinding(passed=False, kind=kind, reason="differs", factor=0.9)
    assert shown(differs, found).statement == Statement.MEAN
    for factor in (2.0, 0.5):  # of the ranks
        assert shown(replace(differs, factor=factor), found).statement == Statement.WRONG
    assert shown(differs, of_both()).statement == Statement.WRONG


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


def test_gradients_that_each_rank_changes_in_its_own_way_are_found():
    def noisy(rank):
        return lambda name: mean(name) + (1 + rank) * np.sin(mean(name))

    steps = [a_step(rank, noisy(rank)) for rank in range(RANKS)]
    found = judged(*steps, drift=0.1)
    assert (found.statement, found.findings[0].kind) == (Statement.WRONG, "exchange")
    assert "each rank changes the gradient of body.weight, head.weight by itself" in first(found)
    assert judged(*steps).statement == Statement.NOT_SHOWN  # the optimiser may exchange


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


def test_a_parameter_that_only_one_process_steps_is_a_fault():
    steps = [replace(a_step(r, mean), used=a_step(r, mean).used[:1]) for r in range(RANKS)]
    alone = LayoutFinding(passed=None, reason="no rank has head.weight", tensor="head.weight")
    found = shown(alone, judged(*steps))
    assert (found.statement, found.findings[0].tensor) == (Statement.WRONG, "head.weight")


@pytest.mark.parametrize(
    ("finding", "statement"),
    [
        (LayoutFinding(passed=True, reason="4 steps agree"), Statement.EQUAL),
        (LayoutFinding(passed=False, kind="gradient", reason="differs"), Statement.WRONG),
        (LayoutFinding(passed=False, kind="update", reason="differs"), Statement.WRONG),
        (LayoutFinding(passed=False, kind="samples", reason="others"), Statement.DATA_PARALLEL),
        (LayoutFinding(passed=False, kind="random", reason="dropout"), Statement.DATA_PARALLEL),
        (LayoutFinding(passed=False, kind="module", reason="differs"), Statement.MEAN),
        (LayoutFinding(passed=None, reason="did not run"), Statement.DATA_PARALLEL),
    ],
)
def test_one_process_decides_only_on_equal_samples(finding, statement):
    assert shown(finding, of_both()).statement == statement


@pytest.mark.parametrize(
    ("own", "reference", "statement"),
    [
        ([COMPRESSED], Statement.DATA_PARALLEL, Statement.DATA_PARALLEL),
        ([COMPRESSED], Statement.MEAN, Statement.MEAN),
        ([], Statement.MEAN, Statement.DATA_PARALLEL),
    ],
)
def test_equality_with_several_ranks_shows_what_is_shown_of_them(own, reference, statement):
    ranks = judged(*(a_step(rank, mean) for rank in range(RANKS)), layout=own)
    equal = LayoutFinding(passed=True, reason="4 steps agree", reference="2 ranks")
    found = shown(equal, ranks, reference, "--reference-ranks 2")
    assert found.statement == statement
    reason = "equal to 2 ranks on the same samples, with --reference-ranks 2"
    assert [each.reason for each in found.findings] == [reason]
    assert found.options == ("--reference-ranks 2" if own else "")


def test_options_of_the_comparison_are_named_where_it_decides():
    wrong = LayoutFinding(passed=False, kind="gradient", reason="differs")
    assert shown(wrong, of_both(), options="--seed 1").options == "--seed 1"
    other = LayoutFinding(passed=False, kind="start", reason="differs")
    assert shown(other, of_both(), options="--seed 1").options == ""


def test_an_accepted_finding_weakens_nothing_and_is_named():
    ranks = of_both(terms=[term(is_mean=None)])
    alone = LayoutFinding(passed=None, reason="other samples", kind="samples")
    found = shown(alone, ranks)
    assert (found.statement, found.acceptable) == (Statement.MEAN, ["loss-term"])
    found = shown(alone, ranks, accept=["loss-term", "batch-norm"])
    assert found.statement == Statement.DATA_PARALLEL
    assert found.options == "--accept loss-term"
    assert [each.kind for each in found.findings] == ["reference samples"]


def test_findings_of_last_steps_stay_where_the_first_ones_are_equal_to_one_process():
    odd = [term(is_mean=None)]
    records = [
        OwnSteps(
            steps=[a_step(r, mean, step=s, terms=odd if s > 1 else [term()]) for s in (0, 1, 8)],
            counts=[9],
        )
        for r in range(RANKS)
    ]
    ranks = judge_ranks(records, 2)
    assert (ranks.statement, ranks.steps, ranks.last) == (Statement.MEAN, 2, 1)
    found = shown(LayoutFinding(passed=True, reason="2 steps agree", steps=2), ranks)
    assert (found.statement, found.steps, found.last) == (Statement.EQUAL, 2, 1)
    assert [each.step for each in found.findings] == [8]


def test_a_fault_cannot_be_accepted():
    found = shown(LayoutFinding(passed=None, reason=""), of_both(lambda n: mean(n) * 2))
    assert (found.statement, found.acceptable) == (Statement.WRONG, [])


def test_weights_that_drift_apart_in_later_steps_are_found():
    def found(value):
        records = [
            OwnSteps(
                steps=[a_step(rank, mean)],
                after=weights(),
                later=[LaterWeights(steps=8, weights=weights(1.0 + rank * value))],
                counts=[9],
                optimizers=["SGD"],
            )
            for rank in range(RANKS)
        ]
        return judge_ranks(records, 1)

    assert found(1e-5).statement == Statement.DATA_PARALLEL  # rounding of many steps
    assert found(0.01).statement == Statement.WRONG
    assert [each.step for each in found(0.01).findings if each.level == "fault"] == [8]


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


def test_gradients_that_are_clipped_before_they_are_unscaled_are_a_remark_or_the_cause():
    ranks = of_both(clipped_scale=1024.0)
    assert (ranks.statement, len(ranks.findings)) == (Statement.DATA_PARALLEL, 1)
    assert "clipped while they are scaled by 1024" in first(ranks)
    differs = LayoutFinding(passed=False, kind="gradient", reason="differs", step=0)
    found = shown(differs, ranks)
    assert (found.statement, found.findings[0].kind) == (Statement.WRONG, "clipped-scaled")


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


def test_a_loss_that_compares_rows_may_differ_from_one_process():
    other = LayoutFinding(passed=False, kind="loss", reason="differs", step=0)
    assert shown(other, of_both()).statement == Statement.WRONG
    assert shown(other, of_both(mixes_rows=True)).statement == Statement.MEAN
    lost = shown(other, of_both(gathered=["all_gather"]))
    assert lost.statement == Statement.WRONG
    assert "which torch.distributed.all_gather loses" in lost.findings[0].reason


def test_a_buffer_outside_of_the_model_is_a_cause_only_where_one_process_differs():
    def buffer(rank):
        value = sketch_of(np.full(4, float(rank)))
        return State(place=TensorPart(name="c"), shape=[4], value=value, is_of_model=False)

    ranks = judged(*(a_step(r, mean, buffers=[buffer(r)]) for r in range(RANKS)))
    assert ranks.statement == Statement.DATA_PARALLEL
    other = LayoutFinding(passed=False, kind="loss", reason="differs", step=0)
    found = shown(other, ranks)
    assert found.statement == Statement.WRONG
    assert found.findings[0].reason.startswith("the buffer c of rank 1 differs")


def test_a_mean_that_one_rank_alone_uses_is_a_fault():
    found = judged(
        a_step(0, mean), a_step(1, lambda name: own_values(name, 0) * 0.2 + own_values(name, 1))
    )
    assert found.statement == Statement.WRONG
    assert first(found) == "only rank 0 uses the mean of the gradients of body.weight, head.weight"


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
