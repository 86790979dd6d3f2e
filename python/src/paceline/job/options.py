"""The arguments that all job scripts share, and the trial that they stand for.

Either `--trial trial.json`, as `paceline run` writes it, or the options by hand. Those go through
the very same spec rules and planning, so that a run by hand and one by `paceline run` cannot
differ. Every rank computes the same trial from them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError

from paceline.errors import EnvironmentLacks, UsageError
from paceline.plan.planning import plan_trials
from paceline.plan.trial import Trial, trial_name
from paceline.records.layout import RunFiles, TrialFiles
from paceline.records.machine import usable_cores
from paceline.spec.loading import parse_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.spec.values import Launcher

# option -> where it stands in a spec
_TRAINING = (
    "global_batch", "epochs", "max_steps", "warmup_steps", "image_size", "precision",
    "memory_format", "learning_rate", "momentum", "reading",
)  # fmt: skip
_DEFAULT_NAME = "by-hand"
# The first of a table is the only one that a command line can be about.
_PLACE_IN_SPEC = re.compile(r"(trials|workloads)\[1\][.:] ?|training\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A trial and where its records go."""

    trial: Trial
    files: TrialFiles
    run: RunFiles | None  # by hand only: this job keeps the run directory itself

    @property
    def managed(self) -> bool:
        """Whether `paceline run` started this, and keeps manifest, command and outcome."""
        return self.run is None


class _Parser(argparse.ArgumentParser):
    """Raises UsageError, so that of many ranks one can speak."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; see --help")


def parser(prog: str) -> argparse.ArgumentParser:
    """The options of a job script called `prog`; each is None where it is not given.

    Its `parse_args` raises UsageError.
    """
    made = _Parser(
        prog=prog,
        argument_default=None,
        allow_abbrev=False,
        description="Train one trial as one rank, or as all of them.",
        epilog="exit codes: 0 done, 2 wrong usage, 3 environment lacks something, 4 bad data, "
        "5 a rank failed, 6 timed out",
    )
    made.add_argument("--trial", type=Path, metavar="TRIAL_JSON", help="then nothing else")
    _add_task(made.add_argument_group("what is trained, and where the records go"))
    _add_placement(made.add_argument_group("how it is spread"))
    _add_limits(made.add_argument_group("limits and telemetry"))
    return made


def _add_task(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workload", metavar="NAME", help="complex-small, simple-big or tiny")
    group.add_argument("--data", metavar="DATASET", help="made by `paceline data ingest`")
    group.add_argument("--out", type=Path, metavar="RUN_DIR", help="may hold other trials already")
    group.add_argument("--name", metavar="NAME", help=f"of the run (default: {_DEFAULT_NAME})")
    group.add_argument("--repeat", type=int, metavar="N", help="number of this repeat, from 0")
    group.add_argument("--seed", type=int, metavar="S")
    group.add_argument("--global-batch", type=int, metavar="N", help="over all ranks")
    group.add_argument("--epochs", type=int, metavar="N")
    group.add_argument("--max-steps", type=int, metavar="N")
    group.add_argument("--warmup-steps", type=int, metavar="N")
    group.add_argument("--image-size", type=int, metavar="PIXELS")
    group.add_argument("--precision", metavar="fp32|bf16")
    group.add_argument("--memory-format", metavar="contiguous|channels_last")
    group.add_argument("--learning-rate", type=float, metavar="X")
    group.add_argument("--momentum", type=float, metavar="X")
    group.add_argument("--no-dropout", action="store_true", default=None)
    group.add_argument("--reading", metavar="memory|stream")
    group.add_argument(
        "--trust-data",
        action="store_true",
        default=None,
        help="open a data set of unknown origin; its schema is a program that then runs",
    )


def _add_placement(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--local-strategy", metavar="sequential|intraop|processes")
    group.add_argument("--transport", metavar="none|gloo|mpi")
    group.add_argument("--ranks", type=int, metavar="N", help="of all nodes together")
    group.add_argument("--ranks-per-node", type=int, metavar="N")
    group.add_argument("--threads-per-rank", type=int, metavar="N")
    group.add_argument("--oversubscribe", action="store_true", default=None)
    group.add_argument("--interface", metavar="NAME", help="that ranks talk over (default: lo)")
    group.add_argument("--bucket-mb", type=float, metavar="MB", help="gradients a message")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trial-timeout", type=float, metavar="SECONDS")
    group.add_argument("--rendezvous-timeout", type=float, metavar="SECONDS")
    group.add_argument("--collective-timeout", type=float, metavar="SECONDS")
    group.add_argument("--telemetry-interval", type=float, metavar="SECONDS")
    group.add_argument("--no-sidecar", action="store_true", default=None)


def asked_ranks(options: argparse.Namespace) -> int | None:
    """The ranks that the options or the trial file ask for; None if they leave it open."""
    if options.trial is not None:
        return read_trial(options.trial).placement.ranks
    ranks: int | None = options.ranks
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks: expected at least 1, got {ranks}")
    return ranks


def job_of(
    options: argparse.Namespace, launcher: Launcher, *, nodes: int, ranks_per_node: int
) -> Job:
    """The job that the options ask for, on the placement that the launcher really made.

    Raises UsageError with every fault, EnvironmentLacks if there are not as many ranks as asked.
    """
    if options.trial is not None:
        return _managed_job(options, launcher, nodes * ranks_per_node)
    missing = [f"--{n}" for n in ("workload", "data", "out") if getattr(options, n) is None]
    if missing:
        raise UsageError(f"expected --trial TRIAL_JSON, or {', '.join(missing)}; see --help")
    if options.ranks is not None:
        check_world_size(options.ranks, nodes * ranks_per_node)
    if options.ranks_per_node not in (None, ranks_per_node):
        raise EnvironmentLacks(
            f"--ranks-per-node {options.ranks_per_node}: the launcher put {ranks_per_node} on a "
            "node; ask it for the same"
        )
    trial = _planned(options, launcher, nodes, ranks_per_node)
    run = RunFiles(options.out.resolve())
    return Job(trial=trial, files=run.trial(trial.id), run=run)


def read_trial(path: Path) -> Trial:
    """A trial that `paceline run` wrote. Raises UsageError if it is none."""
    try:
        return Trial.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"--trial {path}: expected a readable file: {error}") from error
    except ValidationError as error:
        raise UsageError(
            f"--trial {path}: expected a trial of this version of Paceline: {error}"
        ) from error


def check_world_size(expected: int, actual: int) -> None:
    """Raise EnvironmentLacks if the launcher did not start as many ranks as were asked for."""
    if expected != actual:
        raise EnvironmentLacks(
            f"world size: expected {expected} ranks, the launcher made {actual}; start {expected} "
            "ranks (mpirun -n, torchrun --nproc-per-node, srun -n with --mpi=pmix), and with the "
            "launcher of the MPI that mpi4py uses (`paceline doctor` names both)"
        )


def check_not_alone(
    world_size: int, asked: int | None, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise EnvironmentLacks if a single rank was meant to be one of several.

    `srun` without `--mpi=pmix`, or an mpirun of another MPI, starts N jobs of one rank each, and
    every one of them would end well (open-mpi/ompi#13523).
    """
    if world_size != 1 or asked == 1:
        return
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
        meant = environment.get(variable, "")
        if meant.isdigit() and int(meant) > 1:
            raise EnvironmentLacks(
                f"world size: expected {meant} ranks ({variable}), MPI made a world of 1: "
                f"{meant} jobs of one rank each were started. Use srun --mpi=pmix, or the mpirun "
                "of the MPI that mpi4py uses (`paceline doctor` names both); if one rank is meant, "
                "say --ranks 1"
            )
        if meant:
            return  # the launcher's word; the others are about the allocation


def _managed_job(options: argparse.Namespace, launcher: Launcher, ranks: int) -> Job:
    others = [n for n, value in vars(options).items() if n != "trial" and value is not None]
    if others:
        listed = ", ".join("--" + name.replace("_", "-") for name in others)
        raise UsageError(f"--trial says everything; leave out {listed}")
    path = options.trial.resolve()
    trial = read_trial(path)
    if trial.launcher != launcher:
        raise UsageError(
            f'--trial {path}: is for launcher "{trial.launcher}", this is "{launcher}"; its '
            "command.txt has the right command"
        )
    check_world_size(trial.placement.ranks, ranks)
    return Job(trial=trial, files=TrialFiles(path.parent), run=None)


def _planned(
    options: argparse.Namespace, launcher: Launcher, nodes: int, ranks_per_node: int
) -> Trial:
    """By way of a spec, so that there is one set of rules."""
    threads = options.threads_per_rank or 1
    strategy = options.local_strategy
    if strategy is None:
        alone = "sequential" if threads == 1 else "intraop"
        strategy = "processes" if ranks_per_node > 1 else alone
    request = {
        "launcher": launcher,
        "local_strategy": strategy,
        "transport": options.transport,
        "nodes": nodes,
        "ranks_per_node": ranks_per_node,
        "threads_per_rank": threads,
        "oversubscribe": options.oversubscribe,
        "bucket_mb": options.bucket_mb,
    }
    # A spec needs the baseline; a run directory gets it when it is run.
    baseline = {"launcher": "local", "local_strategy": "sequential"}
    is_baseline = launcher == "local" and strategy == "sequential"
    trials = [request] if is_baseline else [request, baseline]
    try:
        experiment = parse_spec(_spec_text(options, trials), "options")
        wanted = plan_trials(
            experiment, {options.workload: _absolute(options.data)}, usable_cores()
        )
    except UsageError as error:
        raise UsageError(_PLACE_IN_SPEC.sub("", str(error))) from error
    trial = next(t for t in wanted if t.launcher == launcher and t.local_strategy == strategy)
    repeat = options.repeat or 0
    if repeat < 0:
        raise UsageError(f"--repeat: expected 0 or more, got {repeat}")
    return trial.model_copy(
        update={"repeat": repeat, "id": trial_name(trial.configuration, repeat)}
    )


def _spec_text(options: argparse.Namespace, trials: Sequence[dict[str, Any]]) -> str:
    top = {"schema": 1, "name": options.name or _DEFAULT_NAME, "repeats": 1, "seed": options.seed}
    workload = {
        "name": options.workload,
        "data": _absolute(options.data),
        "trust_data": options.trust_data,
        "dropout": False if options.no_dropout else None,
        **{name: getattr(options, name) for name in _TRAINING},
    }
    telemetry = {
        "interval_s": options.telemetry_interval,
        "enabled": False if options.no_sidecar else None,
    }
    limits = {
        "trial_s": options.trial_timeout,
        "rendezvous_s": options.rendezvous_timeout,
        "collective_s": options.collective_timeout,
    }
    tables = [
        ("", top),
        ("[[workloads]]", workload),
        *(("[[trials]]", trial) for trial in trials),
        ("[telemetry]", telemetry),
        ("[limits]", limits),
        ("[network]", {"interface": options.interface}),
    ]
    return "\n".join(_toml_table(header, values) for header, values in tables)


def _toml_table(header: str, values: dict[str, Any]) -> str:
    # json's strings, numbers and booleans are TOML's, too
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    return "\n".join([header, *lines])


def _absolute(dataset: str) -> str:
    return dataset if "://" in dataset else str(Path(dataset).resolve())
