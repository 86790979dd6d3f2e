"""`paceline tune comm`: search for the fastest communication settings, trial by trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import EnvironmentLacks, UsageError
from paceline.launchers.mpi.descriptor import MpiSettings
from paceline.launchers.mpi.tools import find_mpirun, unknown_parameters
from paceline.records.layout import RunFiles
from paceline.spec.trial_rules import applies
from paceline.tune.comm.message_times import BinTimes, compare_messages
from paceline.tune.comm.search_space import (
    ROUNDS,
    Round,
    choices,
    given,
    why_left_alone,
    with_communication,
)
from paceline.tune.findings import SCHEMA, Findings
from paceline.tune.search import Bracket, FinalBracket
from paceline.tune.session import run_search
from paceline.tune.spaces import (
    LeftOut,
    Space,
    Target,
    plan_one,
    reason_of,
    space_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.plan.trial import Trial
    from paceline.runner import Progress
    from paceline.spec import Experiment, Spec, TrialRequest, WorkloadRequest
    from paceline.tune.method import SearchContext, SearchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CommFindings:
    """The findings, and the message times of every target."""

    findings: Findings
    messages: Mapping[Target, tuple[BinTimes, ...]]


class CommSearch:
    """Targets are trials of the spec on a workload, searched in rounds.

    A final bracket compares the result of the rounds with the original trial.
    """

    command = "tune comm"

    def __init__(self) -> None:
        self._requests: dict[Target, TrialRequest] = {}
        self._first_rounds: dict[Target, Round] = {}

    def spaces(self, context: SearchContext) -> list[Space]:
        """Return the candidates of the first round; those of later rounds depend on its winner.

        Raises EnvironmentLacks if [tune] contains a parameter that this MPI does not know.
        """
        for parameters in context.settings.mpi_parameters or ():
            unknown = _unknown(parameters, context)
            if unknown is not None:
                raise EnvironmentLacks(f"tune.mpi_parameters: {unknown}")
        found = []
        for workload in context.short.workloads:
            for place, request in enumerate(context.experiment.trials, start=1):
                if applies(request, workload) and not request.is_baseline:
                    target = Target(workload=workload.name, name=f"trials[{place}]")
                    found.append(self._space(target, request, context))
        return found

    def first_bracket(self, space: Space, context: SearchContext) -> Bracket:
        name = self._first_rounds[space.target]
        return Bracket(space.target, space.candidates, context.settings, name=name)

    def following(
        self,
        bracket: Bracket,
        plan: SearchPlan,
        files: RunFiles,  # noqa: ARG002  (of any method of search)
    ) -> Bracket | None:
        """Return the next round with candidates, and finally the comparison with the default."""
        winner, context = bracket.best, plan.context
        if (
            winner is None
            or bracket.target not in self._requests
            or isinstance(bracket, FinalBracket)
        ):
            return None
        done = [number for number, name in enumerate(ROUNDS, start=1) if name == bracket.name]
        following = self._next_round(bracket.target, winner, done[0], context)
        if following is not None:
            name, space = following
            return Bracket(
                bracket.target, space.candidates, context.settings, name=name, follows=bracket
            )
        default = next(s.default for s in plan.spaces if s.target == bracket.target)
        if default is None or default.configuration == winner.configuration:
            return None
        return FinalBracket(default, winner, context.settings, follows=bracket)

    def document(self, plan: SearchPlan, findings: Findings, files: RunFiles) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "cores": plan.context.cores,
            "trials": [
                {
                    "workload": found.target.workload,
                    "trial": found.target.name,
                    **found.to_json(),
                    "messages": [row.to_json() for row in compare_messages(found, files)],
                }
                for found in findings.found
            ],
        }

    def filled_in(
        self,
        request: TrialRequest,
        workload: WorkloadRequest,
        experiment: Experiment,
        findings: Findings,
    ) -> TrialRequest | None:
        place = experiment.trials.index(request) + 1
        found = findings.of(Target(workload=workload.name, name=f"trials[{place}]"))
        if found is None or found.chosen is None or found.chosen == found.default:
            return request
        return with_communication(request, found.chosen)

    def _space(self, target: Target, request: TrialRequest, context: SearchContext) -> Space:
        reason = why_left_alone(request)
        if reason is not None:
            return _nothing(target, reason)
        workload = next(w for w in context.short.workloads if w.name == target.workload)
        dataset = context.datasets.get(target.workload, "")
        try:
            default = plan_one(context.short, workload, request, dataset, context.cores)
        except (UsageError, EnvironmentLacks) as error:
            return _nothing(target, reason_of(error))
        self._requests[target] = request
        first = self._next_round(target, default, 0, context)
        if first is None:
            del self._requests[target]
            return _nothing(target, "nothing to choose: the spec says it all, or it has no effect")
        self._first_rounds[target], space = first
        return space

    def _next_round(
        self, target: Target, reached: Trial, done: int, context: SearchContext
    ) -> tuple[Round, Space] | None:
        """Return the next of ROUNDS with candidates; `done` rounds are over."""
        for name in ROUNDS[done:]:
            request = self._requests[target]
            requests = choices(name, request, reached, context.settings)
            if name == "parameters":  # another Open MPI may lack some of `usual_parameters`
                requests = [
                    r for r in requests if _unknown(given(r, "mpi_parameters"), context) is None
                ]
            space = space_of(
                target,
                [with_communication(request, reached), *requests],
                context.short,
                context.datasets.get(target.workload, ""),
                cores=context.cores,
                settings=context.settings,
            )
            if len(space.candidates) > 1:
                return name, space
        return None


def tune_comm(
    spec: Spec, run_dir: Path, *, resume: bool, progress: Progress, budget_s: float | None = None
) -> CommFindings:
    """Search into `run_dir`; see `session.run_search`."""
    findings = run_search(
        CommSearch(), spec, run_dir, resume=resume, progress=progress, budget_s=budget_s
    )
    files = RunFiles(run_dir)
    return CommFindings(
        findings=findings,
        messages={found.target: compare_messages(found, files) for found in findings.found},
    )


def _nothing(target: Target, reason: str) -> Space:
    left_out = (LeftOut(what="all", reason=reason),)
    return Space(target=target, candidates=(), has_default=False, left_out=left_out)


def _unknown(parameters: Mapping[str, str] | None, context: SearchContext) -> str | None:
    """Return which of the parameters this MPI would ignore silently, as text."""
    if not parameters:
        return None
    return unknown_parameters(
        parameters, find_mpirun(context.experiment.settings("mpi", MpiSettings).mpirun).path
    )
