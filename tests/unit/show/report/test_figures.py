"""Figures of speed, loss and evaluations: what they draw, and what their captions say."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.pages import Page
from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import Comparison, compare_run
from paceline.plan.spec.values import Target
from paceline.show.report.document import charts, page_sections, render
from paceline.show.report.figures.speed import loss_chart, metric_chart, step_distribution_chart


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """A baseline and two equivalent configurations, evaluated every two steps."""
    target = Target(metric="accuracy", at_least=0.6)
    case = fabricate.Case(evaluate_every_steps=2, target=target)
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.SPARK]
    return compare_run(fabricate.make_run(tmp_path, ways, cases=[case]))


def with_steps(comparison: Comparison, **changes: Any) -> Comparison:
    """Return the comparison with these arrays in the steps of every trial."""
    trials = {
        name: tuple(
            dataclasses.replace(trial, steps=dataclasses.replace(trial.steps, **changes))
            for trial in found
        )
        for name, found in comparison.trials.items()
    }
    return dataclasses.replace(comparison, trials=trials)


def test_periodic_steps_keep_their_distribution(comparison: Comparison) -> None:
    """One step in ten is slow, as where weights are averaged every ten steps."""
    step = np.arange(8000)
    time_s = np.where(step % 10 == 9, 3.0, 1.0)
    time_s[5] = 7.0  # the slowest step is shown
    chart = step_distribution_chart(with_steps(comparison, step=step, time_s=time_s), "tiny")
    for box in json.loads(chart.json)["data"]:
        drawn = np.frombuffer(base64.b64decode(box["x"]["bdata"]), dtype=box["x"]["dtype"])
        assert len(drawn) == 400
        assert drawn.max() == 7.0
        assert (drawn > 1).mean() == pytest.approx(0.1, abs=0.005)


def test_loss_that_is_not_known_has_no_difference(comparison: Comparison) -> None:
    first = next(iter(comparison.trials.values()))[0]
    unknown = with_steps(comparison, loss=np.full(len(first.steps.step), np.nan))
    caption = loss_chart(unknown, "tiny").caption
    assert caption.endswith("Line: median of the equivalent ones; band: their range.")
    assert "range. They " in loss_chart(comparison, "tiny").caption


def test_figure_of_loss_says_what_it_leaves_out(comparison, monkeypatch) -> None:
    monkeypatch.setattr("paceline.show.report.figures.charts.MOST_SHOWN", 2)
    caption = loss_chart(comparison, "tiny").caption
    assert caption.endswith(" Shown: the 1 fastest of 3 configurations and the baseline.")


def test_caption_names_the_line_of_the_target_only_where_it_is_drawn(comparison) -> None:
    for metric, has_line in (("accuracy", True), ("loss", False)):
        chart = metric_chart(comparison, "tiny", metric)
        assert bool(json.loads(chart.json)["layout"].get("shapes")) is has_line
        assert ("The dotted line is the target." in chart.caption) is has_line


def test_weak_scaling_draws_each_strategy_over_its_replicas(tmp_path: Path) -> None:
    own = fabricate.scaled_way
    run = fabricate.make_weak_scaling(tmp_path, own(), own(ranks=4, transfer_s=0.1), own(nodes=2))
    comparison = compare_run(run)
    sections = [each for each in page_sections(comparison) if each.anchor == "weak-scaling"]
    [chart] = [chart for each in sections for _, chart in each.figures()]
    assert chart.title == "Weak scaling, tiny"
    lines = [each for each in json.loads(chart.json)["data"] if each.get("showlegend")]
    assert [line["name"] for line in lines] == [
        "processes under mpi over gloo, 2 on each node",
        "processes under mpi over gloo",
    ]
    assert [line["x"] for line in lines] == [[1, 2, 4], [1, 2, 4]]
    assert charts(comparison)[chart.title] == chart


def test_weak_scaling_is_the_first_headline(tmp_path: Path) -> None:
    own = fabricate.scaled_way
    run = fabricate.make_weak_scaling(tmp_path, own(), own(ranks=4, transfer_s=0.1))
    page = Page(render(compare_run(run)))
    headline = next(e for e in page.in_order if e.has_class("headline"))
    assert "Processes under mpi with 4 replicas: 3.4" in headline.text
    assert "efficiency 0.86" in headline.text
