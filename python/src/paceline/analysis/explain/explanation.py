"""The explanation of a pair of configurations as values; `to_json` gives the document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.analysis.explain.causes import name_causes, propose_intervention
from paceline.analysis.explain.difference import difference
from paceline.analysis.explain.evidence import (
    ALL_FIGURES,
    HARDWARE_COUNTERS,
    median_evidence,
    trial_evidence,
)
from paceline.analysis.explain.pair import (
    Pair,
    Side,
    StragglerEvidence,
    TimeOnCores,
    split_time_on_cores,
)
from paceline.analysis.explain.parts import ON_CORES, trial_steps
from paceline.analysis.trial.phases import mean_over_ranks, median_over_repeats, trial_phases
from paceline.errors import NotComparable
from paceline.records.files import jsonable
from paceline.records.phases import ALL_PHASES
from paceline.records.rows import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.analysis.explain.causes import Cause
    from paceline.analysis.explain.difference import Difference, PartDifference, PartNoise
    from paceline.analysis.explain.interventions import Intervention
    from paceline.analysis.explain.pair import Factor
    from paceline.analysis.explain.parts import TrialParts, TrialSteps
    from paceline.analysis.trial.reading import TrialRecord
    from paceline.plan.trial import Trial

OUTSIDE = tuple(phase.name for phase in ALL_PHASES if not phase.in_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRow:
    """A figure of the traces in both configurations; None where it was not measured."""

    name: str
    label: str
    unit: str
    faster: float | None
    slower: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideRow:
    """A phase outside of the steps, such as launch: seconds per trial in both configurations."""

    phase: str
    faster_s: float | None
    slower_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why one configuration takes longer per step than another."""

    faster: str
    slower: str
    difference: Difference
    factors: tuple[Factor, ...]  # of the time on cores; empty without CPU times in the traces
    causes: tuple[Cause, ...]  # largest first; empty if the difference is not significant
    evidence: tuple[EvidenceRow, ...]
    outside_steps: tuple[OutsideRow, ...]
    hardware_counters: str  # why there are none
    without_straggler: bool  # whether the parts leave out the rank with the largest delay
    intervention: Intervention | None  # that can decide a cause; None if Paceline has none
    slower_trial: Trial

    @property
    def main_part(self) -> PartDifference:
        """The part with the largest difference."""
        return max(self.difference.parts, key=lambda part: part.difference_s.mean)

    def to_json(self) -> dict[str, Any]:
        """Return the document of `paceline explain --json`."""
        document: dict[str, Any] = jsonable(
            {
                "schema": SCHEMA,
                "faster": self.faster,
                "slower": self.slower,
                "significant": self.difference.is_significant,
                "common_repeats": self.difference.repeats,
                "faster_s": self.difference.faster_s,
                "slower_s": self.difference.slower_s,
                "difference_s": self.difference.difference_s,
                "parts": self.difference.parts,
                "time_on_cores": self.factors,
                "causes": self.causes,
                "evidence": self.evidence,
                "hardware_counters": self.hardware_counters,
                "outside_steps_s": self.outside_steps,
                "without_straggler": self.without_straggler,
                "intervention": self.intervention and self.intervention.to_json(),
            }
        )
        return document


class ExplainedTrials:
    """The trials of one configuration, read once for all pairs that it is in.

    Raises NotComparable if none has a step after the warm-up.
    """

    def __init__(self, name: str, records: Sequence[TrialRecord]) -> None:
        self.name = name
        found = {record.trial.repeat: trial_steps(record) for record in records if record.finished}
        self.trials = {
            repeat: steps for repeat, steps in found.items() if steps.common.steady.any()
        }
        if not self.trials:
            raise NotComparable(
                f"{name}: expected a finished trial with steps after the warm-up, found none; "
                "repeat it with more steps (`--set workloads.0.max_steps=N`)"
            )
        records = [steps.record for steps in self.trials.values()]
        self.evidence = median_evidence([trial_evidence(record) for record in records])
        self.outside_s = median_over_repeats(
            [
                mean_over_ranks([rank.whole for rank in trial_phases(steps.record, steps.steps)])
                for steps in self.trials.values()
            ]
        )

    @property
    def trial(self) -> Trial:
        return self._first.record.trial

    @property
    def _first(self) -> TrialSteps:
        return next(iter(self.trials.values()))

    def parts(self, *, without_latest: bool) -> dict[int, TrialParts]:
        """Return the parts of each repeat; see `TrialSteps.parts`."""
        return {
            repeat: steps.parts(without_latest=without_latest)
            for repeat, steps in self.trials.items()
        }

    def straggler(self) -> StragglerEvidence | None:
        """Return the rank that makes the others wait in most of the repeats, if there is one."""
        named = [s for s in self.trials.values() if s.straggler is not None]
        ranks = [s.straggler.rank for s in named if s.straggler is not None]
        most = max(ranks, key=ranks.count, default=None)
        if most is None or 2 * ranks.count(most) <= len(self.trials):
            return None
        found = [s for s in named if s.straggler is not None and s.straggler.rank == most]
        delays = [s.straggler.delay_s.mean for s in found if s.straggler is not None]
        return StragglerEvidence(
            rank=most,
            host=None if found[0].straggler is None else found[0].straggler.host,
            delay_s=float(np.median(delays)),
            phase=found[0].straggler_phase,
        )

    def pass_comm_s(self) -> float:
        """Return the communication of layers per step, mean over repeats and ranks."""
        seconds = [steps.steps.steady()["pass_comm_s"] for steps in self.trials.values()]
        return float(np.mean([np.nan_to_num(each).mean() for each in seconds]))

    def cores(self) -> int:
        """Return the cores that the ranks may use, on all hosts, at most those allocated."""
        by_host: dict[str, set[int]] = {}
        for rank in self._first.record.ranks:
            if rank.environment is not None:
                by_host.setdefault(rank.environment.host, set()).update(rank.environment.affinity)
        allowed = sum(map(len, by_host.values()))
        planned = self.trial.placement.cores
        return min(allowed, planned) if allowed else planned


def explain(
    faster: ExplainedTrials,
    slower: ExplainedTrials,
    noise: Mapping[str, PartNoise],
    *,
    paired: bool = True,
) -> Explanation:
    """Explain the difference of two configurations of one workload.

    noise: from `part_noise`. paired: see `difference`. The two are exchanged if `slower` is the
    faster one.
    """
    stragglers = {id(side): side.straggler() for side in (faster, slower)}
    without = any(found is not None for found in stragglers.values())
    parts = [side.parts(without_latest=without) for side in (faster, slower)]
    found = difference(parts[0], parts[1], noise, (faster.name, slower.name), paired=paired)
    if found.difference_s.mean < 0:
        faster, slower = slower, faster
        found = difference(parts[1], parts[0], noise, (faster.name, slower.name), paired=paired)
    sides = [
        Side(
            name=side.name,
            trial=side.trial,
            step_s=step_s,
            cores=side.cores(),
            evidence=side.evidence,
            straggler=stragglers[id(side)],
            pass_comm_s=side.pass_comm_s(),
        )
        for side, step_s in ((faster, found.faster_s), (slower, found.slower_s))
    ]
    factors = _factors(found, sides[0], sides[1])
    pair = Pair(faster=sides[0], slower=sides[1], difference=found, factors=factors)
    causes = name_causes(pair)
    return Explanation(
        faster=faster.name,
        slower=slower.name,
        difference=found,
        factors=factors,
        causes=causes,
        evidence=_evidence_rows(faster.evidence, slower.evidence),
        outside_steps=tuple(
            OutsideRow(phase=n, faster_s=faster.outside_s.get(n), slower_s=slower.outside_s.get(n))
            for n in OUTSIDE
        ),
        hardware_counters=HARDWARE_COUNTERS,
        without_straggler=without,
        intervention=propose_intervention(pair, causes),
        slower_trial=slower.trial,
    )


def _factors(found: Difference, faster: Side, slower: Side) -> tuple[Factor, ...]:
    parts = [found.part(name) for name in ON_CORES]
    walls_s = (sum(part.faster_s for part in parts), sum(part.slower_s for part in parts))
    sides = []
    for side, wall_s in zip((faster, slower), walls_s, strict=True):
        cpu_s = side.per_step("run_cores")
        if not cpu_s or wall_s <= 0:
            return ()
        sides.append(TimeOnCores(wall_s=wall_s, cpu_s=cpu_s, cores=side.cores))
    return split_time_on_cores(*sides)


def _evidence_rows(
    faster: Mapping[str, float | None], slower: Mapping[str, float | None]
) -> tuple[EvidenceRow, ...]:
    return tuple(
        EvidenceRow(
            name=figure.name,
            label=figure.label,
            unit=figure.unit,
            faster=faster[figure.name],
            slower=slower[figure.name],
        )
        for figure in ALL_FIGURES
    )
