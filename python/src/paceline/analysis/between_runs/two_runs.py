"""Compare two runs: before and after a change, two machines, or two versions.

Rows are paired by the name of the configuration. Repeats of different runs have nothing in common,
so no drift of the machine cancels as it does within a run. Therefore both rates have the spread of
whole runs. All pairs of a workload are tested together. With a single repeat in one of the
runs, nothing can be said. A difference between two runs may still come from the state of the
machine at that time.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.analysis.between_runs.speeds import RunSpeeds
from paceline.analysis.statistics.fastest import differing
from paceline.analysis.statistics.intervals import Interval
from paceline.analysis.statistics.model import Belief
from paceline.analysis.statistics.rates import RunRates


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRow:
    """One configuration in two runs."""

    configuration: str
    workload: str
    before: Interval  # samples per second in the first run
    after: Interval  # in the second run
    ratio: Interval  # after / before
    is_different: bool  # significant at 5 % in the family of the workload
    equivalent: tuple[bool | None, bool | None]  # to the baseline of its own run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Two runs: rows in both, and configurations in one of them only."""

    rows: tuple[PairedRow, ...]  # the largest ratio first, by workload
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def faster(self) -> list[PairedRow]:
        return [row for row in self.rows if row.is_different and row.ratio.estimate > 1]

    @property
    def slower(self) -> list[PairedRow]:
        return [row for row in self.rows if row.is_different and row.ratio.estimate < 1]


def compare_runs(before: RunSpeeds, after: RunSpeeds) -> RunComparison:
    """Pair the configurations of two runs and test each pair."""
    rows: list[PairedRow] = []
    for workload in before.workloads:
        rows += _paired_rows(workload, before, after)
    return RunComparison(
        rows=tuple(rows),
        only_before=tuple(name for name in before.rates if name not in after.rates),
        only_after=tuple(name for name in after.rates if name not in before.rates),
    )


def paired_differences(before: RunRates, after: RunRates) -> dict[str, Belief]:
    """Return the logarithm of after / before of each configuration that finished in both runs."""
    pairs = ((name, after.log_ratio_to(before, name)) for name in before.repeats)
    return {name: found for name, found in pairs if found is not None}


def tested_pairs(before: RunRates, after: RunRates) -> dict[str, tuple[Belief, bool]]:
    """Return log(after / before) of each configuration in both, and whether it is different."""
    tests = paired_differences(before, after)
    different = differing(tests, 0.0)
    return {name: (found, name in different) for name, found in tests.items()}


def _paired_rows(workload: str, before: RunSpeeds, after: RunSpeeds) -> list[PairedRow]:
    ours, theirs = before.of_workload(workload), after.of_workload(workload)
    rows = []
    for name, (found, is_different) in tested_pairs(ours, theirs).items():
        speeds = ours.rate(name), theirs.rate(name)
        if speeds[0] is None or speeds[1] is None:
            continue
        rows.append(
            PairedRow(
                configuration=name,
                workload=workload,
                before=speeds[0],
                after=speeds[1],
                ratio=found.estimate(is_tested=is_different).exponential(),
                is_different=is_different,
                equivalent=(before.equivalent[name], after.equivalent[name]),
            )
        )
    return sorted(rows, key=lambda row: -row.ratio.estimate)
