"""Trials as sbatch files: one a configuration, its repeats an array of which one runs at a time.

`srun --mpi=pmix` starts the ranks of MPI trials (https://slurm.schedmd.com/mpi_guide.html); one
process starts those of a single node.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.job.environment import rank_environment
from paceline.render.arguments import job_arguments, why_not
from paceline.render.places import LeftOut, Places, Rendered, by_configuration, limit_s

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.plan.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """Where Paceline is, on every node."""

    places: Places
    python: str
    mpi_script: str  # mpi-jobs/train.py


def render_slurm(
    trials: Sequence[Trial], settings: SlurmSettings
) -> tuple[list[Rendered], list[LeftOut]]:
    """An sbatch file for each configuration that Slurm can start, and why the others are not."""
    rendered: list[Rendered] = []
    left_out: list[LeftOut] = []
    for repeats in by_configuration(trials):
        reason = _why_not(repeats[0])
        if reason is not None:
            left_out.append(LeftOut(configuration=repeats[0].configuration, reason=reason))
            continue
        name = f"{repeats[0].configuration}.sbatch"
        text = "\n".join(_lines(repeats, settings)) + "\n"
        rendered.append(Rendered(name=name, text=text, command=f"sbatch {shlex.quote(name)}"))
    return rendered, left_out


def _why_not(trial: Trial) -> str | None:
    if trial.launcher == "spark":
        return "Slurm has no Spark cluster; submit it to one (docs/how-to/clusters.md)"
    if trial.placement.oversubscribe:
        return "its ranks share cores on purpose, and Slurm gives each its own"
    return why_not(trial)


def _lines(repeats: Sequence[Trial], settings: SlurmSettings) -> Iterator[str]:
    trial = repeats[0]
    yield "#!/bin/bash"
    yield f"# {trial.configuration}, {_times(len(repeats))}; by paceline render slurm"
    yield from (f"#SBATCH --{option}" for option in _options(repeats))
    yield ""
    yield "set -euo pipefail"
    for name, value in _environment(trial).items():
        yield f"export {name}={shlex.quote(value)}"
    yield ""
    arguments = job_arguments(
        trial, data=settings.places.dataset(trial), run_dir=settings.places.run_dir
    )
    yield " \\\n  ".join([_program(trial, settings), *_pairs(arguments), _repeat(repeats)])


def _times(repeats: int) -> str:
    return "once" if repeats == 1 else f"{repeats} times"


def _options(repeats: Sequence[Trial]) -> Iterator[str]:
    trial = repeats[0]
    place = trial.placement
    yield f"job-name={trial.configuration}"
    yield f"output={trial.configuration}.%j.log"
    if len(repeats) > 1:
        yield f"array={','.join(str(t.repeat) for t in repeats)}%1"  # never two beside each other
    yield f"nodes={place.nodes}"
    yield f"ntasks-per-node={place.ranks_per_node if trial.launcher == 'mpi' else 1}"
    cores = place.threads_per_rank if trial.launcher == "mpi" else place.cores_per_node
    yield f"cpus-per-task={cores}"
    if trial.device == "cuda":
        yield f"gpus-per-node={place.ranks_per_node}"
    yield "exclusive"  # a neighbour's load would be measured, too
    yield f"time={math.ceil(limit_s(trial) / 60)}"


def _environment(trial: Trial) -> dict[str, str]:
    environment = rank_environment(trial)
    if trial.launcher == "torchrun":
        # else the agent opens a store for the workers to share, on every interface
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return environment


def _program(trial: Trial, settings: SlurmSettings) -> str:
    python = shlex.quote(settings.python)
    if trial.launcher == "mpi":
        # Without pmix every task is an MPI world of its own. Ranks pin themselves; a step does not
        # have its job's number of CPUs a task by itself since Slurm 22.05.
        cores = f"--cpus-per-task={trial.placement.threads_per_rank}"
        script = shlex.quote(settings.mpi_script)
        return f"srun --mpi=pmix --cpu-bind=none {cores} {python} {script}"
    if trial.launcher == "torchrun":
        ranks = trial.placement.ranks
        return (
            f"{python} -m torch.distributed.run --nnodes=1 --nproc-per-node={ranks} "
            "--max-restarts=0 \\\n  --rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d "
            "--rdzv-endpoint=/tmp/paceline-$SLURM_JOB_ID.rendezvous "
            "\\\n  --rdzv-conf=store_type=file --local-addr=127.0.0.1 -m paceline.launchers.local"
        )
    return f"{python} -m paceline.launchers.local"


def _pairs(arguments: Sequence[str]) -> Iterator[str]:
    """An option and its value, a line each."""
    line: list[str] = []
    for word in arguments:
        if word.startswith("--") and line:
            yield shlex.join(line)
            line = []
        line.append(word)
    if line:
        yield shlex.join(line)


def _repeat(repeats: Sequence[Trial]) -> str:
    if len(repeats) > 1:
        return '--repeat "$SLURM_ARRAY_TASK_ID"'
    return f"--repeat {repeats[0].repeat}"
