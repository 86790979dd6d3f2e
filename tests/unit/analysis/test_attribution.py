"""Shares of the variance of speed: what was put in is found, chance is not."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.unit.analysis.ways import INTRAOP, MPI, MPI_GLOO, SEQUENTIAL, SPARK, TORCHRUN, Way

from paceline.analysis.attribution import Attribution, attribute
from paceline.analysis.compare import compare_run
from paceline.analysis.linear_model import dummies

NODES = {"1 thread": (1, 1), "2 threads": (1, 2), "4 threads": (1, 4), "2 ranks": (2, 1)}


def way_of(launcher: Way, ranks: int, threads: int, seconds: float) -> Way:
    """One configuration whose whole step takes so many seconds."""
    base = dataclasses.replace(
        launcher, local_strategy="processes", ranks=ranks, threads=threads, lead_s=0.0,
        data_wait_s=0.0, transfer_s=0.0, optimizer_s=0.0, other_s=0.0, run_threads=4 * threads,
        cpu_percent=20.0 + 10 * threads,
    )  # fmt: skip
    return dataclasses.replace(base, forward_s=seconds / 3, backward_s=2 * seconds / 3)


def attributed(
    fabricate: ModuleType, root: Path, of_node: list[float], of_launcher: list[float]
) -> Attribution:
    """Effects on the logarithm of the step, by node setup and by launcher."""
    launchers = [dataclasses.replace(way, transport="gloo") for way in (MPI, SPARK, TORCHRUN)]
    ways = [SEQUENTIAL]
    for (ranks, threads), node in zip(NODES.values(), of_node, strict=True):
        for launcher, effect in zip(launchers, of_launcher, strict=True):
            ways.append(way_of(launcher, ranks, threads, 0.3 * math.exp(node + effect)))
    found = attribute([compare_run(fabricate.make_run(root, ways, repeats=2, jitter=0.01))])
    assert found is not None
    return found


@pytest.fixture(scope="module")
def both(fabricate: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Attribution:
    root = tmp_path_factory.mktemp("both")
    return attributed(fabricate, root, [-0.3, -0.1, 0.1, 0.3], [-0.1, 0.0, 0.1])


@pytest.fixture(scope="module")
def node_only(fabricate: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Attribution:
    """The more threads, the faster."""
    root = tmp_path_factory.mktemp("node")
    return attributed(fabricate, root, [0.3, 0.0, -0.3, 0.3], [0.0, 0.0, 0.0])


def test_a_balanced_design_has_the_variances_that_were_put_in(both: Attribution) -> None:
    found = both
    shares = {share.choice: share for share in found.shares}
    # variances of the effects: 0.05 and 0.00667
    assert shares["node"].share.mean == pytest.approx(0.05 / 0.05667, abs=0.02)
    assert shares["node"].p_value < 0.05
    assert shares["launcher"].share.mean == pytest.approx(0.00667 / 0.05667, abs=0.02)
    assert shares["node"].share.low <= shares["node"].share.mean <= shares["node"].share.high
    assert found.unexplained == pytest.approx(0.0, abs=0.02)
    assert found.leave_one_out_error < 0.03  # the effects are additive


def test_the_sentence_has_shares_intervals_and_no_cause(both: Attribution) -> None:
    assert "the choice inside the node goes with" in both.sentence
    assert "These are correlations." in both.sentence
    assert "because" not in both.sentence
    assert "explains" not in both.sentence


def test_a_choice_without_effect_is_not_significant(node_only: Attribution) -> None:
    launcher = next(share for share in node_only.shares if share.choice == "launcher")
    assert launcher.p_value > 0.05
    assert "not significant" in node_only.sentence


def test_figures_that_go_with_speed_are_named(node_only: Attribution) -> None:
    figures = {each.figure: each for each in node_only.figures}
    assert figures["cpu_percent"].correlation > 0.5
    assert figures["cpu_percent"].is_significant
    assert "iowait_percent" not in figures  # the same everywhere
    assert "CPU busy, % (+0." in str(node_only.figure_sentence)


def test_too_few_configurations_have_no_shares(fabricate: ModuleType, tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [SEQUENTIAL, INTRAOP, MPI_GLOO], repeats=2, jitter=0.01)
    assert attribute([compare_run(run)]) is None


def test_several_runs_are_confounders_of_their_own(fabricate: ModuleType, tmp_path: Path) -> None:
    """The second machine is twice as slow; its choices still have the same effects."""
    comparisons = []
    for number, factor in enumerate((1.0, 2.0)):
        ways = [dataclasses.replace(SEQUENTIAL, forward_s=0.2 * factor, backward_s=0.4 * factor)]
        for ranks, threads in NODES.values():
            seconds = factor * 0.4 / (ranks * threads)
            ways += [way_of(MPI, ranks, threads, seconds), way_of(SPARK, ranks, threads, seconds)]
        run = fabricate.make_run(tmp_path / str(number), ways, repeats=2, jitter=0.01)
        comparisons.append(compare_run(run))
    found = attribute(comparisons)
    assert found is not None
    assert found.configurations == 16
    node = next(share for share in found.shares if share.choice == "node")
    assert node.share.mean > 0.7
    assert np.isfinite(found.leave_one_out_error)


def test_the_leave_one_out_error_is_that_of_models_without_the_configuration(
    fabricate: ModuleType, tmp_path: Path
) -> None:
    """Both choices and the confounder are fitted to all other configurations.

    Nothing supports the only configuration on two nodes, so it does not count.
    """
    random = np.random.default_rng(6)
    launchers = [dataclasses.replace(way, transport="gloo") for way in (MPI, SPARK, TORCHRUN)]
    ways = [
        way_of(launcher, ranks, threads, 0.3 * math.exp(random.normal(0.0, 0.2)))
        for ranks, threads in NODES.values()
        for launcher in launchers
    ]
    ways = [SEQUENTIAL, *ways, dataclasses.replace(ways[0], nodes=2)]
    comparison = compare_run(fabricate.make_run(tmp_path, ways, repeats=2, jitter=0.01))
    rows = [row for row in comparison.rows if not row.is_baseline]
    speeds = np.log([row.samples_per_s.median for row in rows if row.samples_per_s is not None])
    choices = [
        dummies([(row.ranks_per_node, row.threads_per_rank) for row in rows]),
        dummies([row.launcher for row in rows]),
        dummies([row.nodes for row in rows]),
    ]
    design = np.hstack(choices)
    errors = []
    for place, row in enumerate(rows):
        kept = np.arange(len(rows)) != place
        weights = np.linalg.lstsq(design[kept], speeds[kept], rcond=1e-9)[0]
        if row.nodes == 1:
            errors.append(np.expm1(design[place] @ weights - speeds[place]))
    found = attribute([comparison])
    assert found is not None
    assert found.configurations == len(rows) == 13
    assert found.leave_one_out_error == pytest.approx(np.sqrt(np.mean(np.square(errors))))
