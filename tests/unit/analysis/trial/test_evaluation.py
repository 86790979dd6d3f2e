"""From evaluations of known numbers to times, ranking, verdict and equivalence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.compare.row import Row
from paceline.analysis.compare.run import Comparison, compare_run
from paceline.analysis.equivalence.record_checks import evaluation_check
from paceline.analysis.equivalence.tolerances import tolerance
from paceline.analysis.trial.evaluation import Evaluations
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.tables import compact_trial
from paceline.plan.spec.values import Target
from paceline.show.report.document import render
from paceline.show.report.table import comparison_text
from paceline.show.report.verdict import verdict_sentence
from paceline.show.report.wording import number

TARGET = Target(metric="accuracy", at_least=0.6)  # 12 of 20 samples: after 8 steps
COMPRESSION = {"method": "topk"}
NAN, INFINITE = math.nan, math.inf
SAMPLE = 0.05  # one of 20


def _run(
    root: Path,
    ways: Sequence[Any],
    repeats: int = 1,
    **case: Any,
) -> RunFiles:
    values = {"evaluate_every_steps": 2, "target": TARGET, **case}
    return fabricate.make_run(root, ways, cases=[fabricate.Case(**values)], repeats=repeats)


def _row(comparison: Comparison, part: str) -> Row:
    return next(r for r in comparison.rows if part in r.configuration)


def _lossy(**changes: Any) -> Any:
    """The configuration with the highest throughput, which learns more slowly."""
    values = {"transport": "gloo", "transfer_s": 0.0, "learned": 1.0, "compression": COMPRESSION}
    return dataclasses.replace(fabricate.MPI, **{**values, **changes})


def _missed(run: RunFiles, part: str) -> None:
    """Rewrite a trial so that its accuracy stays 0."""

    def miss(row: dict[str, Any]) -> None:
        row["sums"] = [0.0] if row["metric"] == "accuracy" else row["sums"]

    (trial,) = (files for name, files in run.trials() if part in name)
    for _, rank in trial.ranks():
        fabricate.edit_rows(rank.evaluations, miss)


@pytest.mark.parametrize("compacted", [False, True])
def test_evaluations_are_joined_and_belong_to_no_step(tmp_path: Path, compacted: bool) -> None:
    way = dataclasses.replace(fabricate.MPI, clock_offset_s=-7.25)
    run = _run(tmp_path, [fabricate.SEQUENTIAL, way], evaluate_every_steps=5)
    if compacted:
        for _, files in run.trials():
            compact_trial(files)
    comparison = compare_run(run)
    row = _row(comparison, ".mpi.")
    (trial,) = comparison.trials[row.configuration]
    found = trial.evaluations
    assert found.steps.tolist() == [5, 10, 12]
    assert found.epoch.tolist() == [0, 1, 2]
    assert found.samples.tolist() == [40, 80, 96]
    assert found.epochs.tolist() == [1.0, 2.0, 2.4]
    assert found.training_s == pytest.approx([5 * 0.345, 10 * 0.345, 12 * 0.345], rel=1e-5)
    pause = fabricate.EVALUATION_S
    wall = [5 * 0.345, 10 * 0.345 + pause, 12 * 0.345 + 2 * pause]
    assert found.wall_s == pytest.approx(wall, rel=1e-5)
    assert found.metrics["accuracy"].tolist() == [8 / 20, 15 / 20, 18 / 20]
    assert found.metrics["loss"] == pytest.approx([1.1, 1.0, 0.96])
    assert row.result.metrics == pytest.approx({"loss": 0.96, "accuracy": 0.9})
    assert trial.steps.time_s == pytest.approx([0.345] * 12, rel=1e-4)
    assert row.speed.samples_per_s.estimate == pytest.approx(8 / 0.345, rel=1e-4)
    assert row.times.phases_s["other"] > 3 * fabricate.EVALUATION_S


def test_time_to_target_ends_with_the_first_evaluation_that_meets_it(tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI]
    comparison = compare_run(_run(tmp_path, ways, repeats=2))
    row = _row(comparison, ".mpi.")
    assert row.goal.target == "accuracy of at least 0.6"
    assert (row.goal.target_reached, row.goal.steps_to_target) == (2, 8)
    assert row.goal.time_to_target_s.estimate == pytest.approx(8 * 0.345, rel=1e-5)
    assert row.goal.target_speedup.estimate == pytest.approx(0.635 / 0.345, rel=1e-5)
    verdict = comparison.verdicts["tiny"]
    assert verdict.best == row.configuration
    assert verdict_sentence(comparison, "tiny").startswith(
        "The fastest to reach accuracy of at least 0.6 is processes under mpi on two cores in "
        "2.76 s, 1.84\u00d7 as fast as one process ("
    )


def test_target_below_a_bound_is_met_from_above(tmp_path: Path) -> None:
    target = Target(metric="loss", at_most=1.0)
    run = _run(tmp_path, [fabricate.SEQUENTIAL], target=target)
    row = _row(compare_run(run), "sequential")
    assert row.goal.steps_to_target == 10  # 1.2 - 0.02 * 10
    assert row.goal.target == "loss of at most 1"


def test_highest_throughput_is_not_the_fastest_to_the_target(tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, _lossy()]
    comparison = compare_run(_run(tmp_path, ways, repeats=2))
    lossy, exact = _row(comparison, "topk"), _row(comparison, ".mpi.mpi.")
    assert [r.configuration for r in comparison.rows][:2] == [
        exact.configuration,
        lossy.configuration,
    ]
    assert lossy.ranked
    assert lossy.equivalence.equivalent is None
    assert lossy.speed.samples_per_s.estimate > exact.speed.samples_per_s.estimate
    sentence = verdict_sentence(comparison, "tiny")
    assert "it takes 12 steps to the target instead of 8. The latter has the highest" in sentence
    # what needs equivalence stays a matter of speed
    assert not lossy.has_comparable_speed


def test_most_repeats_that_miss_the_target_leave_no_time(tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, _lossy(learned=0.5)]
    comparison = compare_run(_run(tmp_path, ways))
    row = comparison.rows[-1]
    assert (row.goal.target_reached, row.goal.time_to_target_s, row.ranked) == (0, None, False)
    text = comparison_text(comparison, 80)
    sentence = verdict_sentence(comparison, "tiny")
    assert sentence.startswith(
        "Only one configuration, one process, reached accuracy of at least 0.6 in 5.08"
    )
    assert (
        "Processes under mpi (send topk) has the highest throughput, but missed the target."
        in sentence
    )
    assert "is not ranked: 1 of 1 repeats did not reach accuracy of at least 0.6" in " ".join(
        text.split()
    )
    assert "missed" in text


def test_repeat_that_misses_the_target_is_censored_not_dropped(tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, _lossy(learned=1.5)]
    run = _run(tmp_path, ways, repeats=3)
    _missed(run, "topk.r1")
    comparison = compare_run(run)
    row = _row(comparison, ".mpi.")
    assert row.goal.target_reached == 2
    # that of the repeats that reached it; nothing is known of the upper bound
    assert row.goal.time_to_target_s.estimate == pytest.approx(8 * 0.335, rel=1e-5)
    assert math.isinf(row.goal.time_to_target_s.high)
    assert "1 of 3 repeats missed the target" in comparison_text(comparison, 200)
    document = comparison.to_json()["rows"][1]  # behind what always reached it
    assert document["time_to_target_s"]["high"] is None
    low = number(row.goal.time_to_target_s.low)
    assert f"({low}\u2013∞)" in render(comparison)


def test_repeats_with_other_seeds_are_checked_against_the_baseline_of_their_seed(
    tmp_path: Path,
) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI]
    comparison = compare_run(_run(tmp_path, ways, repeats=2, vary_seed=True))
    row = _row(comparison, ".mpi.")
    assert row.equivalence.equivalent is True
    assert "each repeat has another seed" in row.notes
    checked = {
        t.repeat: t.equivalence.baseline_id
        for t in comparison.trials[row.configuration]
        if t.equivalence is not None
    }
    assert {repeat: name.rpartition(".")[2] for repeat, name in checked.items()} == {
        0: "r0", 1: "r1",
    }  # fmt: skip


def test_baseline_that_misses_the_target_gives_no_speedup_to_it(tmp_path: Path) -> None:
    run = _run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    _missed(run, ".sequential.")
    row = _row(compare_run(run), ".mpi.")
    assert row.goal.target_speedup is None
    assert row.speed.speedup is not None


def test_values_that_differ_from_the_baseline_are_not_equivalent(tmp_path: Path) -> None:
    worse = dataclasses.replace(fabricate.MPI, learned=1.0)
    comparison = compare_run(_run(tmp_path, [fabricate.SEQUENTIAL, worse]))
    row = _row(comparison, ".mpi.")
    assert row.equivalence.equivalent is False
    assert row.equivalence.equivalence_reason.startswith(
        "evaluation: accuracy after 12 steps differs most"
    )
    assert not row.ranked


def test_one_sample_decided_otherwise_is_rounding(tmp_path: Path) -> None:
    other = dataclasses.replace(fabricate.MPI, learned=1.55)  # 19 of 20 samples in place of 18
    comparison = compare_run(_run(tmp_path, [fabricate.SEQUENTIAL, other], evaluate_every_steps=12))
    row = _row(comparison, ".mpi.")
    assert row.result.metrics["accuracy"] == 0.95
    assert row.equivalence.equivalent is True


def _scores(values: Sequence[float], resolution: float = 0.0) -> Evaluations:
    """Evaluations of one metric."""
    steps = np.arange(1, len(values) + 1)
    seconds = steps.astype(np.float64)
    return Evaluations(
        steps=steps, epoch=steps, samples=steps, training_s=seconds, wall_s=seconds, epochs=seconds,
        metrics={"score": np.array(values)}, resolution={"score": resolution} if resolution else {},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs", "resolution", "passed"),
    [
        ((0.5, 0.9), (0.5, 0.9), 0.0, True),
        ((0.6, 0.9), (0.5, 0.9), 0.0, False),
        ((0.55, 0.85), (0.5, 0.9), SAMPLE, True),
        ((0.6, 0.9), (0.5, 0.9), SAMPLE, False),
        ((0.05, 0.0), (0.0, 0.0), SAMPLE, True),
        ((0.1, 0.0), (0.0, 0.0), SAMPLE, False),
        ((0.1, 0.0), (0.0, 0.0), 0.0, False),
        ((NAN, 0.9), (0.5, 0.9), SAMPLE, False),
        ((0.5, NAN), (0.5, 0.9), 0.0, False),
        ((0.5, 0.9), (NAN, 0.9), 0.0, False),
        ((NAN, 0.9), (NAN, 0.9), 0.0, True),
        ((NAN, 0.6), (NAN, 0.9), 0.0, False),
        ((NAN, NAN), (NAN, NAN), 0.0, True),
        ((0.5, NAN), (NAN, NAN), 0.0, False),
        ((NAN, 0.0), (0.0, 0.0), 0.0, False),
        ((INFINITE, 0.9), (INFINITE, 0.9), 0.0, True),
        ((INFINITE, 0.6), (INFINITE, 0.9), 0.0, False),
        ((INFINITE, 0.9), (0.5, 0.9), 0.0, False),
        ((0.5, 0.9), (INFINITE, 0.9), 0.0, False),
    ],
)
def test_values_that_are_not_finite_must_be_so_in_both(
    ours: tuple[float, ...], theirs: tuple[float, ...], resolution: float, passed: bool
) -> None:
    sides = _scores(ours, resolution), _scores(theirs, resolution)
    assert evaluation_check(*sides, tolerance("fp32", "fp32", 2)).passed is passed


@pytest.mark.parametrize(("ours", "passed"), [(NAN, False), (INFINITE, False), (0.9, None)])
@pytest.mark.parametrize("theirs", [0.5, 0.0])
def test_after_many_steps_only_values_that_are_not_finite_are_decisive(
    ours: float, theirs: float, passed: bool | None
) -> None:
    check = evaluation_check(_scores([ours]), _scores([theirs]), tolerance("fp32", "fp32", 1000))
    assert (check.passed, check.decisive) == (passed, passed is not None)


def test_metric_without_a_value_at_the_end_is_left_out_of_the_row(tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI]
    run = _run(tmp_path, ways, target=None, repeats=2)

    def forget(row: dict[str, Any]) -> None:
        if row["metric"] == "accuracy" and row["steps"] == 12:
            row["counts"] = [0.0]

    for _, files in run.trials():
        for _, rank in files.ranks():
            fabricate.edit_rows(rank.evaluations, forget)
    comparison = compare_run(run)
    assert [row.equivalence.equivalent for row in comparison.rows] == [True, True]
    assert [set(row.result.metrics) for row in comparison.rows] == [{"loss"}] * 2


@pytest.mark.parametrize("width", [80, 120])
def test_table_ranks_by_the_target_beside_the_throughput(tmp_path: Path, width: int) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, _lossy()]
    text = comparison_text(compare_run(_run(tmp_path, ways)), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.split()[:3] == ["to", "target", "samples"] for line in lines)
    rows = [line.split() for line in lines if line.endswith((" ✓", " ~"))]
    assert [row[0] for row in rows] == ["2.76", "4.02", "5.08"]
    assert "meets the target, without the evaluations." in " ".join(text.split())


def test_report_has_the_curves_and_the_table(tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI]
    page = render(compare_run(_run(tmp_path, ways)))
    assert "accuracy, tiny" in page
    for axis in ("training time", "wall time", "samples"):
        assert f'"label":"{axis}"' in page
    assert "tiny, target: accuracy of at least 0.6" in page


def test_evaluation_without_target_changes_no_ranking(tmp_path: Path) -> None:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI]
    comparison = compare_run(_run(tmp_path, ways, target=None, repeats=2))
    assert comparison.rows[0].goal.target is None
    assert comparison.rows[0].result.metrics
    sentence = verdict_sentence(comparison, "tiny")
    words = "The fastest is processes under mpi on two cores, 1.84\u00d7 one process ("
    assert sentence.startswith(words)
    assert "at the end" in render(comparison)
