"""A search from a spec to the spec with its winners; a `SearchMethod` defines what is searched.

A search has a run directory like any run: it contains every short trial, and they can be compared.
Trials with an outcome are not repeated, so an interrupted search can be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from pydantic import BaseModel

from paceline.base.errors import EnvironmentLacks, NotComparable, UsageError
from paceline.base.host.machine import usable_cores
from paceline.base.host.own_runs import remember_run
from paceline.collectives.host import host_name
from paceline.measure.records.files import write_json, write_text
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.loading import AS_WRITTEN, Spec, parse_spec
from paceline.plan.spec.models import Experiment, TrialRequest, TuneSettings, WorkloadRequest
from paceline.plan.spec.rules.trial import applies
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.trial import Trial
from paceline.runner.trials.directory import check_run_dir, made_run_dir, only_runner
from paceline.runner.trials.planning import Planned, Progress, make_datasets, manifest_of
from paceline.runner.trials.preview import preflight
from paceline.runner.tune.search import (
    Bracket,
    FinalBracket,
    Findings,
    Measurements,
    TrialMeasurer,
    findings_of,
    search,
)
from paceline.runner.tune.spaces import (
    BASELINE,
    LeftOut,
    SearchContext,
    SearchTarget,
    Space,
    changed,
    check_batches,
    reason_of,
    short_experiment,
    space_of,
)
from paceline.train.data.catalogue import expected_datasets

# The rounds of a search, as data: what `paceline tune local` and `paceline tune comm` define
#
# All combinations of settings would be hundreds of trials. So each round changes one kind of
# setting, on top of the fastest of the previous rounds.


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """The trials that a search would measure first."""

    context: SearchContext
    baselines: Mapping[str, Trial]  # by workload
    spaces: tuple[Space, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A target with its default, or the reason why it is not searched."""

    target: SearchTarget
    request: TrialRequest
    not_searched: str | None = None


Choices = Callable[[Searched, Trial | None, SearchContext], Sequence[TrialRequest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchMethod:
    """A method of search: its targets, its rounds, and the meaning of its winners.

    rounds: by the kind of setting; each returns what to try for a target on top of the fastest
    trial so far, which is None in the first round of a method that compares targets.
    compares_targets: targets of a workload are alternatives. All are measured, and the fastest is
    the result. present: returns a request with the settings of a trial. filled_in: returns a trial
    of the spec with its winner; None leaves the trial out.
    """

    command: str  # its name: "tune local"
    rounds: Mapping[str, Choices]
    compares_targets: bool
    searched: Callable[[SearchContext], list[Searched]]  # every target with its default
    present: Callable[[TrialRequest, Trial], TrialRequest]
    filled_in: Callable[[TrialRequest, WorkloadRequest, Experiment, Findings], TrialRequest | None]


class RoundSearch:
    """The spaces and brackets of a method."""

    def __init__(self, method: SearchMethod, context: SearchContext) -> None:
        self._method = method
        self._rounds = list(method.rounds.values())
        self._context = context
        self._searched = {each.target: each for each in method.searched(context)}
        self.compares_targets = method.compares_targets

    def first_spaces(self) -> list[Space]:
        """Return the space of every target; empty ones state why in `left_out`."""
        return [self._first_space(each) for each in self._searched.values()]

    def bracket(self, space: Space) -> Bracket:
        return Bracket(
            space.target,
            space.candidates,
            self._context.settings,
            round_number=space.round_number,
        )

    def following(self, bracket: Bracket) -> Bracket | None:
        """Return the next round with candidates, on top of the winner of a finished one."""
        searched = self._searched.get(bracket.target)
        if searched is None or bracket.best is None:
            return None
        space = self._next_space(searched, bracket.best, bracket.round_number + 1)
        return None if space is None else self.bracket(space)

    def finals(self, spaces: Sequence[Space], brackets: Sequence[Bracket]) -> list[Bracket]:
        """Return the comparison of every winner with its default."""
        finals: list[Bracket] = []
        for space in spaces:
            best = [b.best for b in brackets if b.target == space.target and b.best is not None]
            if not best:
                continue
            winner, default = best[-1], space.default
            is_default = default is not None and default.configuration == winner.configuration
            if is_default and not self.compares_targets:
                continue
            candidates = [winner] if default is None or is_default else [default, winner]
            finals.append(FinalBracket(space.target, candidates, self._context.settings))
        return finals

    def _first_space(self, searched: Searched) -> Space:
        if searched.not_searched is not None:
            return _nothing(searched.target, searched.not_searched)
        if self.compares_targets:
            return self._space(searched, None, 0)
        try:
            default = self._context.planned(searched.target.workload, searched.request)
        except (UsageError, EnvironmentLacks) as error:
            return _nothing(searched.target, reason_of(error))
        space = self._next_space(searched, default, 0)
        if space is not None:
            return space
        return _nothing(
            searched.target, "nothing to choose: the spec says it all, or it has no effect"
        )

    def _next_space(self, searched: Searched, reached: Trial, first: int) -> Space | None:
        """Return the first round from number `first` on that has something to choose."""
        for number in range(first, len(self._rounds)):
            space = self._space(searched, reached, number)
            if len(space.candidates) > 1:
                return space
        return None

    def _space(self, searched: Searched, reached: Trial | None, number: int) -> Space:
        # the default keeps its words, so that what is left out is named by them
        present = searched.request
        if number > 0 and reached is not None:
            present = self._method.present(searched.request, reached)
        requests = [present, *self._rounds[number](searched, reached, self._context)]
        return space_of(searched.target, requests, self._context, round_number=number)


def _nothing(target: SearchTarget, reason: str) -> Space:
    left_out = (LeftOut(what="all", reason=reason),)
    return Space(target=target, candidates=(), has_default=False, left_out=left_out)


_HEADER = """\
# {name} with what `paceline {command}` found on {host}, {cores} cores.
# A trial that is for some workloads only says so: their winners differ.

"""


def tuned_text(method: SearchMethod, experiment: Experiment, findings: Findings, cores: int) -> str:
    """Return the tuned spec as TOML. Raises UsageError if the winners do not form a valid spec.

    cores: number of cores of this node.
    """
    plain = experiment.model_dump(**AS_WRITTEN, exclude={"tune", "trials", "workloads"})
    text = _HEADER.format(
        name=experiment.name, command=method.command, host=host_name(), cores=cores
    )
    text += tomli_w.dumps(plain)
    for workload in experiment.workloads:
        text += _entry("workloads", workload)
    for request in tuned_requests(method, experiment, findings, cores):
        text += _entry("trials", request)
    parse_spec(text, "the tuned spec")
    return text


def tuned_requests(
    method: SearchMethod, experiment: Experiment, findings: Findings, cores: int
) -> list[TrialRequest]:
    """Return the trials with their winners; trials that are equal for several workloads are merged.

    Trials that become equal to an earlier one are left out, as is a trial of the best strategy if
    none could be measured. A workload's winner is added if no trial has its strategy.
    """
    wanted: dict[str, tuple[TrialRequest, list[WorkloadRequest]]] = {}
    planned: set[str] = set()
    for request in experiment.trials:
        for workload in (w for w in experiment.workloads if applies(request, w)):
            tuned = method.filled_in(request, workload, experiment, findings)
            if tuned is None:
                continue
            tuned = changed(tuned, workloads=None)
            name = _configuration(tuned, workload, experiment, cores)
            if name in planned:
                continue
            if name is not None:
                planned.add(name)
            wanted.setdefault(tuned.model_dump_json(), (tuned, []))[1].append(workload)
    for workload in experiment.workloads:
        best = findings.best(workload.name) if findings.compares_targets else None
        present = [tuned for tuned, workloads in wanted.values() if workload in workloads]
        if (
            best is not None
            and best.chosen is not None
            and not any(tuned.local_strategy == best.target.name for tuned in present)
        ):
            alone = TrialRequest(launcher="local", local_strategy=best.target.name)
            winner = method.present(alone, best.chosen)
            wanted.setdefault(winner.model_dump_json(), (winner, []))[1].append(workload)
    return [
        _for_workloads(request, workloads, experiment) for request, workloads in wanted.values()
    ]


def _entry(name: str, table: BaseModel) -> str:
    """Return an entry of an array of tables; nested tables follow its plain values."""
    said = table.model_dump(**AS_WRITTEN)
    inner = {key: value for key, value in said.items() if isinstance(value, dict)}
    text = f"\n[[{name}]]\n" + tomli_w.dumps({k: v for k, v in said.items() if k not in inner})
    for key, value in inner.items():
        text += tomli_w.dumps({name: {key: value}})
    return text


def _configuration(
    request: TrialRequest, workload: WorkloadRequest, experiment: Experiment, cores: int
) -> str | None:
    """Return the planner's name; None if it cannot be planned, which the run reports."""
    one = experiment.model_copy(update={"workloads": (workload,), "trials": (request,)})
    try:
        return plan_trials(one, {workload.name: ""}, cores)[0].configuration
    except UsageError:
        return None


def _for_workloads(
    request: TrialRequest, workloads: list[WorkloadRequest], experiment: Experiment
) -> TrialRequest:
    if len(workloads) == len(experiment.workloads):
        return request
    return changed(request, workloads=tuple(w.name for w in workloads))


def plan_search(method: SearchMethod, spec: Spec) -> SearchPlan:
    """Return what `run_search` would measure; creates nothing, and needs no existing data set."""
    check_batches(spec.experiment, method.command)
    context = _context(method, spec, expected_datasets(spec.experiment), files=None)
    return _plan(RoundSearch(method, context), method, context)


def run_search(
    method: SearchMethod,
    spec: Spec,
    run_dir: Path,
    *,
    resume: bool,
    progress: Progress,
    budget_s: float | None = None,
) -> Findings:
    """Search, and write `tuned.toml` and `tuning.json` into `run_dir`.

    budget_s: no short trial starts after this time; replaces [tune] timeout_s. Raises UsageError,
    EnvironmentLacks or DataError before anything runs; RankFailed or TimedOut if a baseline fails;
    NotComparable if no candidate could be measured. Other failed candidates are reported.
    """
    check_batches(spec.experiment, method.command)
    files = RunFiles(run_dir)
    check_run_dir(files, spec, resume=resume)
    with made_run_dir(run_dir):
        context = _context(method, spec, make_datasets(spec.experiment, progress), files=files)
        rounds = RoundSearch(method, context)
        plan = _plan(rounds, method, context)
        preflight(trial for space in plan.spaces for trial in space.candidates)
    with only_runner(run_dir):
        if not files.manifest.exists():
            write_json(files.manifest, manifest_of(_as_planned(plan)))
            remember_run(files.root)
        limit_s = budget_s or plan.context.settings.timeout_s
        measurer = TrialMeasurer(files, plan.baselines, progress, limit_s=limit_s)
        findings = _search(rounds, plan, measurer)
        if all(found.chosen_samples_per_s is None for found in findings.found):
            raise NotComparable(_nothing_measured(findings, files))
        write_json(files.tuning, {"cores": context.cores, **findings.to_json()})
        write_text(files.tuned_spec, tuned_text(method, spec.experiment, findings, context.cores))
    return findings


def _context(
    method: SearchMethod, spec: Spec, datasets: Mapping[str, str], *, files: RunFiles | None
) -> SearchContext:
    experiment = spec.experiment
    if any(workload.script is not None for workload in experiment.workloads):
        raise UsageError(
            f"paceline {method.command}: searches built-in workloads and tasks, got a script; "
            "leave it out of [[workloads]]"
        )
    settings = experiment.tune or TuneSettings()
    return SearchContext(
        experiment=experiment,
        spec_text=spec.text,
        settings=settings,
        short=short_experiment(experiment, settings),
        cores=usable_cores(),
        datasets=datasets,
        files=files,
    )


def _plan(rounds: RoundSearch, method: SearchMethod, context: SearchContext) -> SearchPlan:
    spaces = rounds.first_spaces()
    if not any(space.candidates for space in spaces):
        reasons = "".join(
            f"\n  - {s.target.name}: {o.what}: {o.reason}" for s in spaces for o in s.left_out
        )
        raise UsageError(
            f"experiment {context.experiment.name!r}: `paceline {method.command}` has nothing to "
            f"search on this node:{reasons}"
        )
    baselines = {
        workload.name: context.planned(workload.name, BASELINE)
        for workload in context.short.workloads
    }
    return SearchPlan(context=context, baselines=baselines, spaces=tuple(spaces))


def _as_planned(plan: SearchPlan) -> Planned:
    """Return the baselines and the first measurement of every candidate, for the manifest."""
    candidates = [trial for space in plan.spaces for trial in space.candidates]
    first = {t.id: t for t in [*plan.baselines.values(), *candidates]}
    return Planned(
        experiment=plan.context.experiment,
        spec_text=plan.context.spec_text,
        datasets=dict(plan.context.datasets),
        trials=list(first.values()),
    )


def _search(rounds: RoundSearch, plan: SearchPlan, measurer: TrialMeasurer) -> Findings:
    settings, seed = plan.context.settings, plan.context.experiment.seed
    # the baselines come first, because every other trial is compared with them
    first = [
        Bracket(SearchTarget(workload=workload, name=trial.local_strategy), [trial], settings)
        for workload, trial in plan.baselines.items()
    ]
    known = {bracket.target for bracket in first}
    first += [
        rounds.bracket(space)
        for space in plan.spaces
        if space.candidates and space.target not in known
    ]
    measured = Measurements()
    brackets = search(first, measurer, measured, rounds.following, seed=seed)
    finals = rounds.finals(plan.spaces, brackets)
    brackets += search(finals, measurer, measured, lambda _: None, seed=seed)
    return findings_of(plan.spaces, brackets, measured, compares_targets=rounds.compares_targets)


def _nothing_measured(findings: Findings, files: RunFiles) -> str:
    failures = (found.failures.values() for found in findings.found)
    reasons = {reason.splitlines()[0] for reasons in failures for reason in reasons}
    cut_short = any(found.cut_short for found in findings.found)
    listed = "".join(f"\n  - {reason}" for reason in sorted(reasons))
    advice = (
        f"allow more time (--limit, or [tune] timeout_s) and continue with --resume {files.root}"
        if cut_short
        else (f"the records are in {files.root}")
    )
    return f"{files.root}: no candidate could be measured; {advice}{listed}"
