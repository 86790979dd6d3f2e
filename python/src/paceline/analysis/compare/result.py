"""The comparison of a run as values; `to_json` gives the document of `paceline compare --json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.analysis.compare.compression import CompressionEffect
from paceline.analysis.compare.local_global import FigureRelation, LocalGlobal
from paceline.analysis.compare.row import Row
from paceline.analysis.compare.verdict import Verdict
from paceline.analysis.trial_analysis import TrialAnalysis
from paceline.measure.records.documents import Stopping
from paceline.measure.records.files import jsonable
from paceline.measure.records.rows import SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedTrial:
    """A trial that failed, or has no outcome yet."""

    trial_id: str
    configuration: str
    workload: str
    status: str
    exit_code: int | None
    message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A whole run. Rows are grouped by workload: ranked ones first, in order of speed."""

    experiment: str
    rows: tuple[Row, ...]
    baselines: Mapping[str, str]  # configuration by workload, which speedups are relative to
    sequential: Mapping[str, str]  # configuration by workload, which equivalence is relative to
    verdicts: Mapping[str, Verdict]  # by workload
    unfinished: tuple[UnfinishedTrial, ...]
    flags: tuple[str, ...]
    local_global: tuple[LocalGlobal, ...]
    node_figures: tuple[FigureRelation, ...]
    compression: tuple[CompressionEffect, ...]
    trials: Mapping[str, tuple[TrialAnalysis, ...]]  # by configuration, in order of repeat
    manifest: Mapping[str, Any]
    stopping: Stopping | None = None  # of `repeats = "auto"`

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(row.workload for row in self.rows))

    def rows_of(self, workload: str) -> list[Row]:
        return [row for row in self.rows if row.workload == workload]

    def row(self, configuration: str) -> Row:
        return next(row for row in self.rows if row.configuration == configuration)

    def to_json(self) -> dict[str, Any]:
        """Return the document of the command line contract.

        `baseline` and `verdict` are those of the only workload; null if there are several, see
        `workloads`.
        """
        workloads = {
            name: {
                "baseline": self.baselines.get(name),
                "equivalence_baseline": self.sequential.get(name),
                "verdict": self.verdicts[name],
            }
            for name in self.workloads
        }
        only = next(iter(workloads.values())) if len(workloads) == 1 else {}
        document: dict[str, Any] = jsonable(
            {
                "schema": SCHEMA,
                "experiment": self.experiment,
                "baseline": only.get("baseline"),
                "verdict": only.get("verdict"),
                "workloads": workloads,
                "rows": [row.to_json() for row in self.rows],
                "unfinished": self.unfinished,
                "flags": self.flags,
                "local_global": self.local_global,
                "node_figures": self.node_figures,
                "gradient_compression": self.compression,
                "automatic_repeats": self.stopping,
            }
        )
        return document
