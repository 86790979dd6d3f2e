"""`paceline render`: write the trials of a spec as files for a scheduler."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click

from paceline.base.errors import UsageError
from paceline.base.host.messages import say
from paceline.cli.options import all_of, count, out_option, positive, spec_argument
from paceline.measure.records.files import write_text
from paceline.plan.spec.loading import load_spec
from paceline.plan.spec.models import Experiment
from paceline.plan.spec.values import is_remote
from paceline.plan.trials.trial import Trial
from paceline.runner.launchers.schedulers.files import SUBMIT, Places, Rendered
from paceline.runner.launchers.schedulers.kubernetes import (
    MOUNT,
    KubernetesSettings,
    render_kubernetes,
    toleration,
)
from paceline.runner.launchers.schedulers.slurm import SlurmSettings, render_slurm
from paceline.runner.trials.planning import plan

_SLURM_OPTION = re.compile(r"[a-z][a-z-]*(=.+)?")


@click.group("render")
def command() -> None:
    """Write the trials of a spec as jobs of a scheduler."""


_takes_run = all_of(
    spec_argument,
    out_option("DIR", "Write the files here; default: NAME-SCHEDULER."),
    click.option("--run-dir", metavar="RUN_DIR", help="Run directory on the nodes."),
    click.option(
        "--cores", metavar="N", type=count,
        help="Cores of a node, for `auto`; default: those of this machine.",
    ),
)  # fmt: skip
_takes_data_dir = click.option(
    "--data-dir", metavar="DIR", help="Folder on the nodes with a data set for each workload."
)


@command.command("slurm")
@_takes_run
@_takes_data_dir
@click.option(
    "--python",
    metavar="PATH",
    default=sys.executable,
    show_default=False,
    help="Python on the nodes; default: this one.",
)
@click.option(
    "--sbatch",
    "sbatch_options",
    metavar="OPTION=VALUE",
    multiple=True,
    help="Option of sbatch, such as account=NAME; may be repeated.",
)
@click.option(
    "--srun",
    "srun_options",
    metavar="OPTION=VALUE",
    multiple=True,
    help="Option of the srun that starts ranks of `mpi`, such as mpi=pmi2; may be repeated.",
)
def slurm(
    spec: str,
    out: Path | None,
    data_dir: str | None,
    run_dir: str | None,
    cores: int | None,
    python: str,
    sbatch_options: tuple[str, ...],
    srun_options: tuple[str, ...],
) -> None:
    """Write sbatch files; submit nothing.

    SPEC is a TOML file, or the name of a shipped experiment.
    """
    experiment, trials = _planned(spec, cores)
    settings = SlurmSettings(
        places=Places(
            run_dir=_run_dir(run_dir, experiment),
            data_dir=None if data_dir is None else _from_here(data_dir),
        ),
        python=python,
        sbatch_options=_checked(sbatch_options),
        srun_options=_checked(srun_options),
    )
    for dataset in sorted({settings.places.dataset(trial) for trial in trials}):
        if dataset and not is_remote(dataset) and not Path(dataset).exists():
            say(
                f"note: {dataset} does not exist yet; make it with `paceline data synth` and "
                "`paceline data ingest` on storage that all nodes share (--data-dir)"
            )
    folder = out or Path(f"{experiment.name}-slurm")
    _write(folder, render_slurm(trials, settings))
    say(
        f"next: `bash {folder / SUBMIT}` submits all trials, of which one runs at a time; then "
        f"`paceline compare {settings.places.run_dir}`"
    )


def _checked(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return options without dashes. Raises click.UsageError for other text, and for lines."""
    options = tuple(option.removeprefix("--") for option in given)
    for option in options:
        if _SLURM_OPTION.fullmatch(option) is None:
            raise click.UsageError(
                f"expected an option of Slurm with its value, such as account=NAME, got {option!r}"
            )
    return options


def _run_dir(given: str | None, experiment: Experiment) -> str:
    return _from_here(given or f"runs/{experiment.name}")


def _from_here(path: str) -> str:
    """Return an absolute path, because a job may start anywhere; a URL stays."""
    return path if is_remote(path) else str(Path(path).absolute())


@command.command("kubernetes")
@_takes_run
@_takes_data_dir
@click.option(
    "--claim",
    metavar="NAME",
    default="paceline",
    help="PersistentVolumeClaim that pods mount at /shared.",
)
@click.option(
    "--registry",
    metavar="PREFIX",
    default="",
    show_default=False,
    help="Registry of the container images, ending in a slash.",
)
@click.option("--namespace", metavar="NAME", help="Namespace of the objects.")
@click.option(
    "--service-account",
    metavar="NAME",
    default="spark",
    help="Account with which Spark drivers start executors.",
)
@click.option(
    "--memory-gib",
    metavar="GIB",
    type=positive,
    help="Memory of a rank; default: an estimate from the model, at least 4 GiB.",
)
@click.option(
    "--pull-secret",
    "pull_secrets",
    metavar="NAME",
    multiple=True,
    help="Secret with which images are pulled.",
)
@click.option(
    "--node-selector",
    "labels",
    metavar="KEY=VALUE",
    multiple=True,
    help="Label of the nodes to use.",
)
@click.option(
    "--toleration",
    "tolerations",
    metavar="KEY=VALUE:EFFECT",
    multiple=True,
    help="Taint of nodes that may be used.",
)
@click.option("--queue", metavar="NAME", help="Queue of Kueue.")
@click.option(
    "--gpu-resource",
    metavar="NAME",
    help="Name of a GPU in the cluster, such as nvidia.com/gpu; each rank gets one.",
)
def kubernetes(
    spec: str,
    out: Path | None,
    data_dir: str | None,
    run_dir: str | None,
    cores: int | None,
    labels: tuple[str, ...],
    tolerations: tuple[str, ...],
    **settings: Any,
) -> None:  # fmt: skip
    """Write SparkApplication, MPIJob and Job objects; apply nothing.

    SPEC is a TOML file, or the name of a shipped experiment.
    """
    experiment, trials = _planned(spec, cores)
    places = Places(
        run_dir=run_dir or f"{MOUNT}/runs/{experiment.name}",
        data_dir=data_dir or f"{MOUNT}/data",
    )
    given = KubernetesSettings(
        places=places,
        node_selector=dict(map(_label, labels)),
        tolerations=tuple(map(toleration, tolerations)),
        **settings,
    )
    folder = out or Path(f"{experiment.name}-kubernetes")
    _write(folder, render_kubernetes(trials, given))
    say(f"next: `bash {folder / SUBMIT}` runs one trial after another with kubectl")


def _label(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not key or not found:
        raise click.UsageError(f"--node-selector: expected KEY=VALUE, got {text!r}")
    return key, value


def _planned(source: str, cores: int | None) -> tuple[Experiment, list[Trial]]:
    """Return trials that are jobs of their own. Raises UsageError where they cannot be."""
    spec = load_spec(source)
    experiment = spec.experiment
    searched = [t for t in experiment.trials if t.local_strategy == "best"]
    if searched:
        raise UsageError(
            f'{source}: local_strategy "best" needs a search; run `paceline tune local '
            "SPEC` on a node first, and render the tuned.toml that it writes"
        )
    if experiment.repeats == "auto":
        say(
            "note: jobs do not look at the ranking, so all "
            f"{experiment.max_repeats} repeats are written"
        )
    planned = plan(spec, cores)
    for text in planned.left_out:
        say(f"left out: {text}")
    return experiment, planned.trials


def _write(out: Path, rendered: Rendered) -> None:
    for configuration, reason in rendered.left_out.items():
        say(f"left out {configuration}: {reason}")
    if not rendered.files:
        raise UsageError("expected at least one trial that can be rendered, the spec has none")
    for name, text in rendered.files.items():
        write_text(out / name, text)
        print(out / name)
