"""The statement about a script beside the comparison of its whole training."""

from __future__ import annotations

import pytest

from paceline.analysis.equivalence.checks import Check, checks_of_statement
from paceline.analysis.equivalence.observed import LayoutFinding
from paceline.analysis.equivalence.own_checks import Level, RankFinding
from paceline.analysis.equivalence.ranks import RanksFinding, Statement
from paceline.analysis.equivalence.shown import Shown, shown

AGREES = Check(name="final_weights", passed=True, reason="equal")
DIFFERS = Check(name="final_weights", passed=False, reason="0.4 apart")
SAMPLES = Check(name="samples", passed=False, reason="16, the baseline's 8")
UNKNOWN = Check(name="not checked", passed=None, reason="no seed")
REPLICAS = Check(name="replicas", passed=True, reason="equal, bit for bit")
DRIFT = Check(name="replicas", passed=False, reason="rank 1 ended with another weight")
ROUNDED = RankFinding(level=Level.REMARK, kind="drift", reason="by rounding")
PARALLEL = RankFinding(level=Level.NOT_SHOWN, kind="tensor parallel", reason="divided")
ZERO = RankFinding(level=Level.NOT_SHOWN, kind="zero", reason="all gradients are zero")


def found(statement, *checks, findings=()):
    """Return the statement and the result of all checks together."""
    shown = Shown(statement=statement, findings=findings, steps=4, last=0, rows=(8, 8))
    shown, of_script = checks_of_statement(shown, checks)
    results = [each.passed for each in of_script if each.decisive]
    return shown.statement, False if False in results else None if None in results else True


@pytest.mark.parametrize(
    ("statement", "checks", "expected"),
    [
        (Statement.EQUAL, (AGREES, REPLICAS), (Statement.EQUAL, True)),
        (Statement.DATA_PARALLEL, (SAMPLES, DIFFERS, REPLICAS), (Statement.DATA_PARALLEL, True)),
        (Statement.DATA_PARALLEL, (UNKNOWN, REPLICAS), (Statement.DATA_PARALLEL, True)),
        (Statement.MEAN, (UNKNOWN, REPLICAS), (Statement.MEAN, None)),
        (Statement.NOT_SHOWN, (DIFFERS, REPLICAS), (Statement.NOT_SHOWN, None)),
        (Statement.WRONG, (AGREES, REPLICAS), (Statement.WRONG, False)),
    ],
)
def test_the_first_steps_decide(statement, checks, expected):
    assert found(statement, *checks) == expected


def test_layouts_whose_ranks_show_little_are_compared_as_a_whole():
    equal = (Statement.EQUAL, True)
    assert found(Statement.NOT_SHOWN, AGREES, REPLICAS, findings=(PARALLEL,)) == equal
    nothing = found(Statement.NOT_SHOWN, AGREES, REPLICAS, findings=(ZERO,))
    assert nothing == (Statement.NOT_SHOWN, None)


def test_later_differences_are_a_suspicion_where_the_samples_are_equal():
    assert found(Statement.EQUAL, DIFFERS, REPLICAS) == (Statement.MEAN, None)
    assert found(Statement.EQUAL, SAMPLES, DIFFERS, REPLICAS) == (Statement.EQUAL, True)


def test_replicas_that_end_apart_are_wrong_but_for_roundings():
    assert found(Statement.DATA_PARALLEL, UNKNOWN, DRIFT) == (Statement.WRONG, False)
    rounded = found(Statement.DATA_PARALLEL, UNKNOWN, DRIFT, findings=(ROUNDED,))
    assert rounded == (Statement.DATA_PARALLEL, True)
    assert found(Statement.NOT_SHOWN, UNKNOWN, DRIFT) == (Statement.NOT_SHOWN, None)


def test_one_step_is_called_the_first_step():
    shown = Shown(statement=Statement.DATA_PARALLEL, findings=(), steps=1, last=0, rows=(8, 8))
    assert shown.words.startswith("a right data-parallel step, in the first step (2")


MIXED = RankFinding(level=Level.WEAKER, kind="mixed-rows", reason="combines rows")
LOST = RankFinding(level=Level.SUSPICION, kind="gathered", reason="without their gradient")


@pytest.mark.parametrize(
    ("is_within", "findings", "expected"),
    [
        (False, (MIXED,), Statement.MEAN),  # it may depend on which rows are together
        (True, (MIXED,), Statement.WRONG),
        (True, (LOST, MIXED), Statement.MEAN),  # it may be meant
        (False, (), Statement.WRONG),
    ],
)
def test_rows_that_a_loss_combines_explain_no_gradient_within_the_model(
    is_within, findings, expected
):
    differs = LayoutFinding(passed=False, reason="", kind="gradient", step=0, is_within=is_within)
    ranks = RanksFinding(statement=Statement.MEAN, findings=findings, steps=4, rows=(8, 8))
    assert shown(differs, ranks).statement == expected
