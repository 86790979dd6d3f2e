"""A run as one job of PBS or Grid Engine: `qsub FILE` starts `paceline run` in an allocation.

One job has all trials, so that repeats are interleaved as without a scheduler. These schedulers do
not start ranks as srun does; mpirun does, on the hosts of the allocation.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.launchers.schedulers.files import Rendered, limit_s
from paceline.plan.trial import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class QsubSettings:
    """The arguments of `paceline run` in the job, and the site's options of qsub."""

    name: str
    spec: str  # as `paceline run` takes it
    folder: str  # where relative paths of the spec begin; all nodes see it
    run_dir: str
    python: str
    options: tuple[str, ...] = ()  # without the dash, such as "A mine"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheduler:
    name: str
    mark: str  # begins a line with an option
    hosts: str  # prints the hosts of the job as a hostfile of mpirun


# PBS writes a line for each slot.
_PBS = _Scheduler(
    name="pbs",
    mark="#PBS",
    hosts="""sort "$PBS_NODEFILE" | uniq -c | awk '{ print $2, "slots=" $1 }'""",
)
_SGE = _Scheduler(
    name="sge", mark="#$", hosts="""awk '{ print $1, "slots=" $2 }' "$PE_HOSTFILE\""""
)


def render_pbs(trials: Sequence[Trial], settings: QsubSettings) -> Rendered:
    """Return the job for PBS, with nodes of its own."""
    nodes, cores = _size(trials)
    gpus = max(t.placement.ranks_per_node if t.device == "cuda" else 0 for t in trials)
    options = [
        f"l select={nodes}:ncpus={cores}:mpiprocs={cores}" + (f":ngpus={gpus}" if gpus else ""),
        "l place=scatter:excl",  # the load of other jobs would change the measurement
        f"l walltime={_limit(trials)}",
        "j oe",
    ]
    return _render(_PBS, options, trials, settings)


def render_sge(
    trials: Sequence[Trial], settings: QsubSettings, parallel_environment: str
) -> Rendered:
    """Return the job for Grid Engine, whose parallel environment says how many slots a host has."""
    nodes, cores = _size(trials)
    options = [
        f"pe {parallel_environment} {nodes * cores}",
        f"l h_rt={_limit(trials)}",
        "j y",
        "cwd",
        "S /bin/bash",
    ]
    return _render(_SGE, options, trials, settings)


def _size(trials: Sequence[Trial]) -> tuple[int, int]:
    """Return the nodes of the largest trial, and the most cores that one uses on a node."""
    places = [trial.placement for trial in trials]
    return max(p.nodes for p in places), max(p.cores_per_node for p in places)


def _limit(trials: Sequence[Trial]) -> str:
    """Return the time after which all trials have ended by their own limits, as HH:MM:SS."""
    minutes = -(-sum(map(limit_s, trials)) // 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def _render(
    scheduler: _Scheduler, options: Sequence[str], trials: Sequence[Trial], settings: QsubSettings
) -> Rendered:
    script = _lines(scheduler, options, trials, settings)
    return Rendered(files={f"{settings.name}.{scheduler.name}": "\n".join(script) + "\n"})


def _lines(
    scheduler: _Scheduler, options: Sequence[str], trials: Sequence[Trial], settings: QsubSettings
) -> Iterator[str]:
    yield "#!/bin/bash"
    yield f"# trials: {len(trials)}; written by paceline render {scheduler.name}"
    for option in (f"N paceline-{settings.name}", *options, *settings.options):
        yield f"{scheduler.mark} -{option}"
    yield ""
    yield "set -euo pipefail"
    yield f"cd {shlex.quote(settings.folder)}"
    yield f"run_dir={shlex.quote(settings.run_dir)}"
    yield f"paceline=({shlex.quote(settings.python)} -m paceline.cli)"
    words = f'run {shlex.quote(settings.spec)} --out "$run_dir"'
    if any(trial.placement.nodes > 1 for trial in trials):
        # The run keeps the name of this file, so a later job finds its own hosts in it.
        yield 'mkdir -p "$(dirname "$run_dir")"'
        yield f'{scheduler.hosts} >"$run_dir.hosts"'
        words += """ --set "mpi.hostfile='$run_dir.hosts'\""""
    yield ""
    yield 'if [ -e "$run_dir/manifest.json" ]; then'
    yield '  exec "${paceline[@]}" run --resume "$run_dir"'
    yield "fi"
    yield f'exec "${{paceline[@]}}" {words}'
