"""Interface of a search method: what `paceline tune local` and `paceline tune comm` define."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.plan.trial import Trial
    from paceline.records.layout import RunFiles
    from paceline.spec import Experiment, TrialRequest, TuneSettings, WorkloadRequest
    from paceline.tune.findings import Findings
    from paceline.tune.search import Bracket
    from paceline.tune.spaces import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchContext:
    """Facts that all parts of a search use."""

    experiment: Experiment
    spec_text: str
    settings: TuneSettings
    short: Experiment  # the experiment with the number of steps of a search
    cores: int
    datasets: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """The trials that a search would measure."""

    context: SearchContext
    baselines: Mapping[str, Trial]  # by workload
    spaces: tuple[Space, ...]


class SearchMethod(Protocol):
    """A method of search: its candidates, follow-up brackets, and the meaning of its winners."""

    command: str  # name of the command: "tune local"

    def spaces(self, context: SearchContext) -> list[Space]:
        """Return the space of every workload and target; empty ones state why in `left_out`."""
        ...

    def first_bracket(self, space: Space, context: SearchContext) -> Bracket: ...

    def following(self, bracket: Bracket, plan: SearchPlan, files: RunFiles) -> Bracket | None:
        """Return the bracket that starts from the winner of a finished one, if any."""
        ...

    def document(self, plan: SearchPlan, findings: Findings, files: RunFiles) -> dict[str, Any]:
        """Return the content of `tuning.json`."""
        ...

    def filled_in(
        self,
        request: TrialRequest,
        workload: WorkloadRequest,
        experiment: Experiment,
        findings: Findings,
    ) -> TrialRequest | None:
        """Return a trial of the spec with its winner filled in; None to leave the trial out."""
        ...
