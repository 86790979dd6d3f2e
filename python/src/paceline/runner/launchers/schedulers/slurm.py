"""Trials as sbatch files: one per configuration; its repeats are an array that runs one at a time.

The planned trial lies beside it as JSON, in the folder from which the user calls sbatch.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.plan.spec.extensions import LAUNCHERS, load_object
from paceline.plan.trials.trial import Trial
from paceline.runner.job.context import rank_environment
from paceline.runner.launchers.schedulers.files import (
    CannotRender,
    Places,
    Rendered,
    limit_s,
    render,
    shipped_trial,
    task_files,
    trial_text,
    with_script,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """The place of Paceline on every node, and what the site's Slurm needs.

    Options are without `--`, such as "account=mine".
    """

    places: Places
    python: str
    sbatch_options: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()  # where srun starts the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """A launcher's part of an sbatch file; its `render_slurm` returns it."""

    command: str  # starts the job side; the job's options follow
    tasks_per_node: int = 1
    cpus_per_task: int
    environment: Mapping[str, str] = field(default_factory=dict)
    preparation: tuple[str, ...] = ()  # lines of bash before the command


def render_slurm(trials: Sequence[Trial], settings: SlurmSettings) -> Rendered:
    """Return an sbatch file and a planned trial for each configuration."""

    def files_of(repeats: list[Trial]) -> dict[str, str]:
        first = repeats[0]
        script = _lines(repeats, _step(first, settings), settings)
        return {
            f"{first.configuration}.sbatch": "\n".join(script) + "\n",
            f"{first.configuration}.json": trial_text(shipped_trial(first, settings.places)),
            **task_files(first),
        }

    rendered = render(trials, files_of)
    submitted = [t for t in trials if f"{t.configuration}.sbatch" in rendered.files]
    repeated = {t.configuration for t in submitted if t.repeat > 0}
    submissions = [_submission(t, is_array=t.configuration in repeated) for t in submitted]
    return with_script(rendered, [_SUBMIT, *submissions])


# Jobs read the planned trial from the folder in which sbatch is called.
_SUBMIT = r"""#!/bin/bash
# Submit all trials; each starts when the one before it has ended. Written by paceline render slurm.
set -euo pipefail
cd "$(dirname "$0")"
previous=

submit() {
    previous=$(sbatch --parsable ${previous:+--dependency=afterany:$previous} "$@")
    previous=${previous%%;*}  # after it comes the cluster's name
    echo "$previous: $*"
}
"""


def _submission(trial: Trial, *, is_array: bool) -> str:
    repeat = f"--array={trial.repeat} " if is_array else ""
    return f"submit {repeat}{shlex.quote(f'{trial.configuration}.sbatch')}"


def _step(trial: Trial, settings: SlurmSettings) -> SlurmStep:
    """Return the launcher's part. Raises CannotRender."""
    hook = LAUNCHERS.get(trial.launcher).render_slurm
    if hook is None:
        raise CannotRender(f'launcher "{trial.launcher}" cannot be started by Slurm')
    if trial.placement.oversubscribe:
        raise CannotRender("its ranks share cores on purpose, but Slurm gives each its own")
    step: SlurmStep = load_object(hook)(trial, settings)
    return step


def _lines(repeats: Sequence[Trial], step: SlurmStep, settings: SlurmSettings) -> Iterator[str]:
    trial = repeats[0]
    yield "#!/bin/bash"
    yield f"# {trial.configuration}, repeats: {len(repeats)}; written by paceline render slurm"
    yield from (f"#SBATCH --{option}" for option in _options(repeats, step))
    yield from (f"#SBATCH --{option}" for option in settings.sbatch_options)
    yield ""
    yield "set -euo pipefail"
    for name, value in {**rank_environment(trial), **step.environment}.items():
        yield f"export {name}={shlex.quote(value)}"
    yield from step.preparation
    yield ""
    repeat = '"$SLURM_ARRAY_TASK_ID"' if len(repeats) > 1 else str(trial.repeat)
    yield " \\\n  ".join(
        [
            step.command,
            f'--trial "$SLURM_SUBMIT_DIR"/{shlex.quote(trial.configuration)}.json',
            f"--out {shlex.quote(settings.places.run_dir)}",
            f"--repeat {repeat}",
        ]
    )


def _options(repeats: Sequence[Trial], step: SlurmStep) -> Iterator[str]:
    trial = repeats[0]
    yield f"job-name={trial.configuration}"
    yield f"output={trial.configuration}.%j.log"
    if len(repeats) > 1:
        yield f"array={','.join(str(t.repeat) for t in repeats)}%1"  # never two at the same time
    yield f"nodes={trial.placement.nodes}"
    yield f"ntasks-per-node={step.tasks_per_node}"
    yield f"cpus-per-task={step.cpus_per_task}"
    if trial.device == "cuda":
        yield f"gpus-per-node={trial.placement.ranks_per_node}"
    yield "exclusive"  # the load of other jobs would change the measurement
    yield f"time={math.ceil(limit_s(trial) / 60)}"
