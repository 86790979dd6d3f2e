"""`paceline tune comm`: the search for the fastest way of communicating, trial by trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.errors import EnvironmentLacks, UsageError
from paceline.host.tools import find_mpirun
from paceline.launchers.mpi.mca import unknown_parameters
from paceline.records.layout import RunFiles
from paceline.spec.trial_rules import applies
from paceline.tune.comm.messages import BinTimes, compare_messages
from paceline.tune.comm.space import ROUNDS, Round, choices, why_left_alone, with_communication
from paceline.tune.findings import SCHEMA, Findings
from paceline.tune.search import Contest, Final
from paceline.tune.session import run_search
from paceline.tune.spaces import (
    BASELINE,
    LeftOut,
    Space,
    Subject,
    plan_one,
    reason_of,
    space_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.plan.trial import Trial
    from paceline.runner import Progress
    from paceline.spec import Experiment, TrialRequest, WorkloadRequest
    from paceline.tune.session import Scene, SearchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CommFindings:
    """What was found, and of every subject the time of its messages."""

    findings: Findings
    messages: Mapping[Subject, tuple[BinTimes, ...]]


class CommSearch:
    """A subject is a trial of the spec on a workload, searched in rounds.

    A last contest sets what the rounds have found against the trial as it is.
    """

    command = "tune comm"

    def __init__(self) -> None:
        self._requests: dict[Subject, TrialRequest] = {}
        self._first_rounds: dict[Subject, Round] = {}

    def spaces(self, scene: Scene) -> list[Space]:
        """The candidates of the first round; the others depend on its winner.

        Raises EnvironmentLacks if [tune] names a parameter that this MPI does not know.
        """
        for parameters in scene.settings.mpi_parameters or ():
            unknown = _unknown(parameters, scene)
            if unknown is not None:
                raise EnvironmentLacks(f"tune.mpi_parameters: {unknown}")
        found = []
        for workload in scene.short.workloads:
            for place, request in enumerate(scene.experiment.trials, start=1):
                if applies(request, workload) and not _is_baseline(request):
                    subject = Subject(workload=workload.name, name=f"trials[{place}]")
                    found.append(self._space(subject, request, scene))
        return found

    def first_contest(self, space: Space, scene: Scene) -> Contest:
        name = self._first_rounds[space.subject]
        return Contest(space.subject, space.candidates, scene.settings, name=name)

    def following(
        self,
        contest: Contest,
        plan: SearchPlan,
        files: RunFiles,  # noqa: ARG002  (of any kind of search)
    ) -> Contest | None:
        """The next round that has something to try, and at last the final against the default."""
        winner, scene = contest.best, plan.scene
        if winner is None or contest.subject not in self._requests or isinstance(contest, Final):
            return None
        done = [number for number, name in enumerate(ROUNDS, start=1) if name == contest.name]
        following = self._next_round(contest.subject, winner, done[0], scene)
        if following is not None:
            name, space = following
            return Contest(
                contest.subject, space.candidates, scene.settings, name=name, follows=contest
            )
        default = next(s.default for s in plan.spaces if s.subject == contest.subject)
        if default is None or default.configuration == winner.configuration:
            return None
        return Final(default, winner, scene.settings, follows=contest)

    def document(self, plan: SearchPlan, findings: Findings, files: RunFiles) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "cores": plan.scene.cores,
            "trials": [
                {
                    "workload": found.subject.workload,
                    "trial": found.subject.name,
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
        found = findings.of(Subject(workload=workload.name, name=f"trials[{place}]"))
        if found is None or found.chosen is None or found.chosen == found.default:
            return request
        return with_communication(request, found.chosen)

    def _space(self, subject: Subject, request: TrialRequest, scene: Scene) -> Space:
        reason = why_left_alone(request)
        if reason is not None:
            return _nothing(subject, reason)
        workload = next(w for w in scene.short.workloads if w.name == subject.workload)
        dataset = str(scene.datasets[subject.workload])
        try:
            default = plan_one(scene.short, workload, request, dataset, scene.cores)
        except (UsageError, EnvironmentLacks) as error:
            return _nothing(subject, reason_of(error))
        self._requests[subject] = request
        first = self._next_round(subject, default, 0, scene)
        if first is None:
            del self._requests[subject]
            return _nothing(subject, "nothing to choose: the spec says it all, or it has no effect")
        self._first_rounds[subject], space = first
        return space

    def _next_round(
        self, subject: Subject, reached: Trial, done: int, scene: Scene
    ) -> tuple[Round, Space] | None:
        """The next of ROUNDS, of which so many are done, that has something to try."""
        for name in ROUNDS[done:]:
            request = self._requests[subject]
            asked = choices(name, request, reached, scene.settings)
            if name == "parameters":  # another Open MPI may not have those of `usual_parameters`
                asked = [r for r in asked if _unknown(r.mpi_parameters, scene) is None]
            space = space_of(
                subject,
                [with_communication(request, reached), *asked],
                scene.short,
                str(scene.datasets[subject.workload]),
                cores=scene.cores,
                settings=scene.settings,
            )
            if len(space.candidates) > 1:
                return name, space
        return None


def tune_comm(
    spec: str, run_dir: Path, *, resume: bool, progress: Progress, budget_s: float | None = None
) -> CommFindings:
    """Search into `run_dir`; the rest is as with any search, see `session.run_search`."""
    findings = run_search(
        CommSearch(), spec, run_dir, resume=resume, progress=progress, budget_s=budget_s
    )
    files = RunFiles(run_dir)
    return CommFindings(
        findings=findings,
        messages={found.subject: compare_messages(found, files) for found in findings.found},
    )


def _is_baseline(request: TrialRequest) -> bool:
    return (request.launcher, request.local_strategy) == (
        BASELINE.launcher,
        BASELINE.local_strategy,
    )


def _nothing(subject: Subject, reason: str) -> Space:
    left_out = (LeftOut(what="all", reason=reason),)
    return Space(subject=subject, candidates=(), has_default=False, left_out=left_out)


def _unknown(parameters: Mapping[str, str], scene: Scene) -> str | None:
    """Which of the parameters this MPI would pass over in silence, in words."""
    if not parameters:
        return None
    return unknown_parameters(parameters, find_mpirun(scene.experiment.mpi.mpirun).path)
