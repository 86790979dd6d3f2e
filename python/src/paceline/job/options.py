"""The arguments that all job scripts share, and the trial that they stand for.

Either `--trial trial.json`, as `paceline run` writes it, or the options by hand. Those go through
the very same spec rules and planning, so that a run by hand and one by `paceline run` cannot
differ. Every rank computes the same trial from them.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

from pydantic import ValidationError

from paceline.errors import EnvironmentLacks, UsageError
from paceline.job.trial_by_hand import DEFAULT_NAME, TELEMETRY_PATHS, trial_by_hand
from paceline.plan.trial import Trial
from paceline.records.layout import RunFiles, TrialFiles
from paceline.spec.values import (
    Algorithm,
    Balance,
    Compression,
    Device,
    LocalStrategy,
    PipelineSchedule,
    Reduction,
    Transport,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.spec.values import Launcher


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
    _add_communication(made.add_argument_group("how gradients travel"))
    _add_limits(made.add_argument_group("limits"))
    _add_telemetry(made.add_argument_group("telemetry, as in [telemetry] of a spec"))
    return made


def _add_task(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--workload", metavar="NAME", help="complex-small, simple-big or tiny")
    group.add_argument("--data", metavar="DATASET", help="made by `paceline data ingest`")
    group.add_argument("--out", type=Path, metavar="RUN_DIR", help="may hold other trials already")
    group.add_argument("--name", metavar="NAME", help=f"of the run (default: {DEFAULT_NAME})")
    group.add_argument("--repeat", type=int, metavar="N", help="number of this repeat, from 0")
    group.add_argument("--seed", type=int, metavar="S")
    group.add_argument("--global-batch", type=int, metavar="N", help="over all replicas")
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


def _add_placement(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--local-strategy", metavar="|".join(get_args(LocalStrategy)))
    group.add_argument("--transport", metavar="|".join(get_args(Transport)))
    group.add_argument("--reduction", metavar="|".join(get_args(Reduction)))
    group.add_argument("--device", metavar="|".join(get_args(Device)))
    group.add_argument("--ranks", type=int, metavar="N", help="of all nodes together")
    group.add_argument("--ranks-per-node", type=int, metavar="N")
    group.add_argument("--threads-per-rank", type=int, metavar="N")
    group.add_argument("--replicas", type=int, metavar="K", help="of the model, on a node")
    group.add_argument("--stages", type=int, metavar="S", help="that a replica is cut into")
    group.add_argument("--micro-batches", type=int, metavar="M", help="of a replica's samples")
    group.add_argument("--schedule", metavar="|".join(get_args(PipelineSchedule)))
    group.add_argument("--balance", metavar="|".join(get_args(Balance)))
    group.add_argument(
        "--split-points",
        type=_layers,
        metavar="5,10",
        help="first layer of each stage but the first",
    )
    group.add_argument("--oversubscribe", action="store_true", default=None)
    group.add_argument("--interface", metavar="NAME", help="that ranks talk over (default: lo)")
    group.add_argument("--bucket-mb", type=float, metavar="MB", help="gradients a message")


def _add_communication(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--buckets-in-flight", type=int, metavar="N", help="messages at once")
    group.add_argument("--algorithm", metavar="|".join(get_args(Algorithm)))
    group.add_argument("--compression", metavar="|".join(get_args(Compression)))
    group.add_argument("--compression-rank", type=int, metavar="R", help="of powersgd")
    group.add_argument("--compression-density", type=float, metavar="SHARE", help="of topk")
    group.add_argument(
        "--averaging-period", type=int, metavar="STEPS", help="local SGD: average weights so often"
    )
    group.add_argument("--averaging-start", type=int, metavar="STEPS", help="before local SGD")


def _layers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"expected numbers of layers as in 5,10, got {text!r}"
        ) from error


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trial-timeout", type=float, metavar="SECONDS")
    group.add_argument("--rendezvous-timeout", type=float, metavar="SECONDS")
    group.add_argument("--collective-timeout", type=float, metavar="SECONDS")


def _add_telemetry(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--no-sidecar", action="store_true", default=None)
    group.add_argument("--telemetry-interval", type=float, metavar="SECONDS")
    group.add_argument("--telemetry-listen-host", metavar="ADDRESS")
    group.add_argument(
        "--telemetry-listen-port", type=int, metavar="PORT", help="0: any free one; -1: no metrics"
    )
    for name in TELEMETRY_PATHS:
        group.add_argument(f"--telemetry-{name.replace('_', '-')}", metavar="PATH")


def asked_ranks(options: argparse.Namespace) -> int | None:
    """The ranks that the options or the trial file ask for; None if they leave it open."""
    if options.trial is not None:
        return read_trial(options.trial).placement.ranks
    ranks: int | None = options.ranks
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks: expected at least 1, got {ranks}")
    return ranks


def job_of(
    options: argparse.Namespace, launcher: Launcher, *, nodes: int, ranks_per_node: int | None
) -> Job:
    """The job that the options ask for, on the placement that the launcher really made.

    ranks_per_node: None where nobody has started ranks yet; then there are as many as `--ranks` or
    `--ranks-per-node` say, else as many as the local strategy takes.
    Raises UsageError with every fault, EnvironmentLacks if there are not as many ranks as asked.
    """
    if options.trial is not None:
        return _managed_job(options, launcher, ranks_per_node and nodes * ranks_per_node)
    missing = [f"--{n}" for n in ("workload", "data", "out") if getattr(options, n) is None]
    if missing:
        raise UsageError(f"expected --trial TRIAL_JSON, or {', '.join(missing)}; see --help")
    if ranks_per_node is None:
        ranks_per_node = asked_ranks(options) or options.ranks_per_node
    elif options.ranks is not None:
        check_world_size(options.ranks, nodes * ranks_per_node)
    if options.ranks_per_node not in (None, ranks_per_node):
        raise EnvironmentLacks(
            f"--ranks-per-node {options.ranks_per_node}: the launcher put {ranks_per_node} on a "
            "node; ask it for the same"
        )
    trial = trial_by_hand(options, launcher, nodes, ranks_per_node)
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


def _managed_job(options: argparse.Namespace, launcher: Launcher, ranks: int | None) -> Job:
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
    if ranks is not None:
        check_world_size(trial.placement.ranks, ranks)
    return Job(trial=trial, files=TrialFiles(path.parent), run=None)
