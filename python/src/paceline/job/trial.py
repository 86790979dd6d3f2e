"""The trial that a job trains: read from `--trial`, or planned from the other options.

Options go through the rules and the planning of a spec, so that a trial started by hand and one of
`paceline run` cannot differ. Every rank computes the same trial from them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from paceline.errors import EnvironmentLacks, UsageError
from paceline.job.launched_by import launching_pid
from paceline.job.options import DEFAULT_NAME, JobOptions, option_name, parse_options
from paceline.plan.planning import plan_trials
from paceline.plan.trial import Trial, trial_name
from paceline.records.layout import RunFiles, TrialFiles
from paceline.spec.extensions import WORKLOADS
from paceline.spec.loading import check_spec
from paceline.spec.models import SCHEMA
from paceline.spec.values import absolute_name

if TYPE_CHECKING:
    from collections.abc import Mapping

_BASELINE = {"launcher": "local", "local_strategy": "sequential"}
# The messages of a spec name the place; a command line describes a single trial.
_PLACE_IN_SPEC = re.compile(r"(trials|workloads)\[1\][.:] ?|training\.")
_REQUIRED = (("workloads", "name"), ("workloads", "data"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A trial and the place of its records."""

    trial: Trial
    files: TrialFiles
    run: RunFiles | None  # set where this job itself keeps the run directory

    @property
    def supervised(self) -> bool:
        """Return whether `paceline run` started this job: it then keeps manifest and outcome."""
        return self.run is None


def parse_job(
    launcher: str, prog: str, *, nodes: int = 1, ranks_per_node: int | None = None
) -> Job:
    """Return the job that this process's command line describes; see `job_of`."""
    return job_of(parse_options(prog), launcher, nodes=nodes, ranks_per_node=ranks_per_node)


def job_of(
    options: JobOptions, launcher: str, *, nodes: int = 1, ranks_per_node: int | None = None
) -> Job:
    """Return the job that the options describe, on the placement that the launcher has made.

    ranks_per_node: None if no ranks have been started yet. Their number is then the one of
    `--trial`, `--ranks` or `--ranks-per-node`, else the local strategy decides.
    Raises UsageError with every fault, EnvironmentLacks if the number of ranks differs.
    """
    if options.trial_file is not None:
        return _planned_job(options, launcher, ranks_per_node and nodes * ranks_per_node)
    required = _REQUIRED[:1] if _has_own_samples(options) else _REQUIRED
    missing = [option_name(*key) for key in required if options.value(*key) is None]
    if options.out is None:
        missing.append("--out")
    if options.out is None or missing:
        raise UsageError(f"expected --trial TRIAL_JSON, or {', '.join(missing)}; see --help")
    wanted = options.value("trials", "ranks_per_node")
    if ranks_per_node is None:
        ranks_per_node = asked_ranks(options) or (wanted if isinstance(wanted, int) else None)
    elif options.ranks is not None:
        check_world_size(options.ranks, nodes * ranks_per_node)
    if wanted not in (None, "auto", ranks_per_node):
        raise EnvironmentLacks(
            f"--ranks-per-node {wanted}: the launcher started {ranks_per_node} on a node; request "
            "the same number from the launcher"
        )
    trial = _trial(options, launcher, nodes, ranks_per_node)
    run = RunFiles(options.out.resolve())
    return Job(trial=trial, files=run.trial(trial.id), run=run)


def read_trial(path: Path) -> Trial:
    """Read a planned trial, whose task may be in a file beside it.

    Raises UsageError if the file has no trial.
    """
    try:
        return _with_own_file(Trial.model_validate_json(path.read_bytes()), path.parent)
    except OSError as error:
        raise UsageError(f"--trial {path}: expected a readable file: {error}") from error
    except ValidationError as error:
        raise UsageError(
            f"--trial {path}: expected a trial of this version of Paceline: {error}"
        ) from error


def _with_own_file(trial: Trial, folder: Path) -> Trial:
    """Return the trial with the task's file of this folder, if it is there."""
    place, _, name = trial.training.task.rpartition(":")
    own = folder / Path(place).name
    if trial.training.task_sha256 is None or not own.is_file():
        return trial
    training = trial.training.model_copy(update={"task": f"{own.resolve()}:{name}"})
    return trial.model_copy(update={"training": training})


def asked_ranks(options: JobOptions) -> int | None:
    """Return the number of ranks that the options or the trial file give; None if they do not."""
    if options.trial_file is not None:
        return read_trial(options.trial_file).placement.ranks
    if options.ranks is not None and options.ranks < 1:
        raise UsageError(f"--ranks: expected at least 1, got {options.ranks}")
    return options.ranks


def check_world_size(expected: int, actual: int) -> None:
    """Raise EnvironmentLacks if the launcher did not start the expected number of ranks."""
    if expected != actual:
        raise EnvironmentLacks(
            f"world size: expected {expected} ranks, the launcher made {actual}; start {expected} "
            "ranks (mpirun -n, torchrun --nproc-per-node, srun -n with --mpi=pmix), and use the "
            "launcher of the MPI that mpi4py uses (`paceline doctor` names both)"
        )


def check_not_alone(
    world_size: int, ranks: int | None, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise EnvironmentLacks if a single rank was meant to be one of several.

    `srun` without `--mpi=pmix`, or an mpirun of another MPI, starts N jobs of one rank each, and
    every one of them would end well (open-mpi/ompi#13523).
    """
    if world_size != 1 or ranks == 1:
        return
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
        text = environment.get(variable, "")
        if text.isdigit() and int(text) > 1:
            raise EnvironmentLacks(
                f"world size: expected {text} ranks ({variable}), MPI made a world of 1: "
                f"{text} jobs of one rank each were started. Use srun --mpi=pmix, or the mpirun "
                "of the MPI that mpi4py uses (`paceline doctor` names both); if one rank is meant, "
                "add --ranks 1"
            )
        if text:
            return  # set by the launcher; the other variables describe the allocation


def _planned_job(options: JobOptions, launcher: str, ranks: int | None) -> Job:
    """Return the job of `--trial`. With `--out`, the job keeps its records there itself."""
    assert options.trial_file is not None
    others = [f"--{n}" for n in ("name", "seed", "ranks") if getattr(options, n) is not None]
    others += [
        option_name(table, key) if value is not False else "--no-" + option_name(table, key)[2:]
        for table, keys in options.tables.items()
        for key, value in keys.items()
    ]
    if options.out is None and options.repeat is not None:
        others.append("--repeat")
    if others:
        raise UsageError(f"--trial describes the whole trial; leave out {', '.join(others)}")
    path = options.trial_file.resolve()
    trial = read_trial(path)
    if trial.launcher != launcher:
        raise UsageError(
            f'--trial {path}: is for launcher "{trial.launcher}", this is "{launcher}"; its '
            "command.txt has the right command"
        )
    if ranks is not None:
        check_world_size(trial.placement.ranks, ranks)
    if options.out is None:
        return Job(trial=trial, files=TrialFiles(path.parent), run=None)
    if options.repeat is not None:
        trial = _repeat(trial, options.repeat)
    run = RunFiles(options.out.resolve())
    return Job(trial=trial, files=run.trial(trial.id), run=run)


def _has_own_samples(options: JobOptions) -> bool:
    """Return whether the task can do without a data set."""
    name = options.value("workloads", "name")
    named = name in WORKLOADS and WORKLOADS.get(str(name)).own_samples
    return named or options.value("workloads", "task") is not None


def _trial(options: JobOptions, launcher: str, nodes: int, ranks_per_node: int | None) -> Trial:
    """Plan the trial. Raises UsageError with every fault."""
    keys = dict(options.tables.get("trials", {}))
    keys.setdefault("local_strategy", _default_strategy(keys, ranks_per_node))
    request = {**keys, "launcher": launcher, "nodes": nodes}
    if ranks_per_node is not None:
        request["ranks_per_node"] = ranks_per_node
    workload = dict(options.tables["workloads"])
    if "data" in workload:  # a task may have samples of its own
        workload["data"] = absolute_name(workload["data"])
    # A spec needs the baseline; a run directory gets it when it is run.
    is_baseline = _BASELINE.items() <= request.items()
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "name": options.name or DEFAULT_NAME,
        "repeats": 1,
        **({} if options.seed is None else {"seed": options.seed}),
        "workloads": [workload],
        "trials": [request] if is_baseline else [request, _BASELINE],
        **{name: options.tables.get(name, {}) for name in ("telemetry", "limits", "network")},
    }
    try:
        experiment = check_spec(document, "options")
        (trial,) = plan_trials(
            experiment.model_copy(update={"trials": experiment.trials[:1]}),
            {str(workload["name"]): workload.get("data", "")},
            _node_cores(),
        )
    except UsageError as error:
        raise UsageError(_PLACE_IN_SPEC.sub("", str(error))) from error
    return _repeat(trial, options.repeat or 0)


def _repeat(trial: Trial, repeat: int) -> Trial:
    """Return the trial as that repeat."""
    if repeat < 0:
        raise UsageError(f"--repeat: expected 0 or more, got {repeat}")
    changes = {"repeat": repeat, "id": trial_name(trial.configuration, repeat)}
    return trial.model_copy(update=changes)


def _default_strategy(keys: Mapping[str, Any], ranks_per_node: int | None) -> str:
    """Return the local strategy where none is named."""
    if ranks_per_node is not None and ranks_per_node > 1:
        return "processes"
    return "sequential" if keys.get("threads_per_rank") in (None, 1) else "intraop"


def _node_cores() -> int:
    """Return the cores of this node: those of the launcher, as mpirun may have bound this rank."""
    return len(os.sched_getaffinity(launching_pid()))
