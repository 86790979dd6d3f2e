"""What one process adds to the judgement of ranks, from fabricated records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.analysis.equivalence.fabricated_ranks import (
    RANKS,
    a_step,
    judged,
    mean,
    of_both,
    sketch_of,
    term,
)

from paceline.analysis.equivalence.observed import LayoutFinding
from paceline.analysis.equivalence.ranks import Statement, judge_ranks
from paceline.analysis.equivalence.shown import shown
from paceline.measure.records.own_steps import COMPRESSED, OwnSteps, State, TensorPart


def test_gradients_that_were_not_seen_may_be_equal_to_those_of_one_process():
    agrees = LayoutFinding(passed=True, reason="1 steps agree", steps=1)
    unseen = judged(*(replace(a_step(rank, mean), own=[]) for rank in range(RANKS)))
    assert unseen.statement == Statement.NOT_SHOWN
    assert shown(agrees, unseen).statement == Statement.EQUAL
    nothing = judged(*(replace(a_step(rank, mean), own=[], used=[]) for rank in range(RANKS)))
    assert shown(agrees, nothing).statement == Statement.NOT_SHOWN


def test_other_terms_on_ranks_are_the_cause_of_another_gradient_than_that_of_one_process():
    differs = LayoutFinding(passed=False, kind="gradient", reason="all modules agree", step=0)
    terms = [term(), term(kind="SumBackward0", is_mean=False)]
    ranks = judged(a_step(0, mean, terms=terms), a_step(1, mean))
    found = shown(differs, ranks)
    assert (ranks.statement, found.statement) == (Statement.MEAN, Statement.WRONG)
    assert found.findings[0].reason == "the losses of ranks have different terms"


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_loss_that_combines_rows_may_have_another_gradient_in_one_process(kind):
    found = of_both(mixes_rows=True)
    differs = LayoutFinding(passed=False, kind=kind, reason="differs", factor=0.9)
    assert shown(differs, found).statement == Statement.MEAN
    for factor in (2.0, 0.5):  # of the ranks
        assert shown(replace(differs, factor=factor), found).statement == Statement.WRONG
    assert shown(differs, of_both()).statement == Statement.WRONG


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


def test_other_labels_are_a_suspicion_unless_rows_have_other_gradients_anyway():
    labels = LayoutFinding(passed=False, kind="labels", reason="samples have other labels")
    found = shown(labels, of_both())
    assert (found.statement, found.is_suspicious) == (Statement.MEAN, True)
    assert shown(labels, of_both(mixes_rows=True)).is_suspicious is False
