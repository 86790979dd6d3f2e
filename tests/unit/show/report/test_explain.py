"""The overview of a run's differences names each configuration, whichever has the shorter mean."""

from __future__ import annotations

import dataclasses

from tests.support.terminal import shown
from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import compare_run, explain_workload
from paceline.analysis.statistics.intervals import Mean
from paceline.show.report.explain import (
    difference_sentence,
    name_in,
    overview,
)


def test_other_configuration_is_named_also_where_its_mean_is_shorter(tmp_path) -> None:
    run = fabricate.make_run(
        tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI], repeats=3, jitter=0.01
    )
    comparison = compare_run(run)
    (found,) = explain_workload(comparison, "tiny")
    reference = comparison.verdicts["tiny"].best
    assert reference == found.faster
    reversed_ = dataclasses.replace(found, faster=found.slower, slower=found.faster)
    other = "Where a step is shorter, the cause belongs to the one that it is compared with."
    lines = []
    for each in (found, reversed_):
        text = shown(overview(comparison, [each], reference))
        (heading, *_, row, empty, note) = text.rstrip().removesuffix(other).rstrip().splitlines()
        assert text.rstrip().endswith(other) == (each is reversed_)
        assert heading.startswith("Steps compared with those of mpi · mpi · processes 2")
        assert (empty, note) == ("", "Shares of causes are upper bounds; they may overlap.")
        assert row.startswith("local · sequential ")
        lines.append(row.split()[3:7])
    (more, low, _, high), (less, *bounds) = lines
    assert float(more) > 0
    assert [less, *bounds] == [f"-{more}", f"-{high}", "to", f"-{low}"]


def test_configurations_that_the_ranking_does_not_separate_are_named_so(tmp_path) -> None:
    run = fabricate.make_run(
        tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI], repeats=3, jitter=0.01
    )
    comparison = compare_run(run)
    (found,) = explain_workload(comparison, "tiny")
    name = name_in(comparison)
    assert found.is_significant
    said = difference_sentence(dataclasses.replace(found, causes=()), name)
    assert said.endswith(" times as long. No evidence explains it.")
    chance = (
        "Among so many comparisons, a difference may be chance although its interval excludes 0."
    )
    assert chance not in shown(overview(comparison, [found], found.faster))
    near = dataclasses.replace(found, is_significant=False, causes=(), unexplained=None)
    text = shown(overview(comparison, [near], near.faster))
    assert "undecided" in text
    assert chance in " ".join(text.split())
    sentence = difference_sentence(near, name)
    assert sentence.startswith("Undecided: local · sequential takes ")
    assert sentence.endswith(f" ms). {chance}")
    wide = Mean(mean=near.difference_s.mean, low=-1.0, high=1.0)
    near = dataclasses.replace(near, difference_s=wide)
    assert chance not in " ".join(shown(overview(comparison, [near], near.faster)).split())
    assert difference_sentence(near, name).endswith(" ms).")
