"""`paceline render`: write the trials of a spec as files for Slurm or Kubernetes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.numbers import count, positive
from paceline.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from paceline.launchers.schedulers.files import Rendered
    from paceline.plan.trial import Trial
    from paceline.spec import Experiment


def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    render = verbs.add_parser("render", help="write the trials of a spec as jobs of a scheduler")
    kinds = render.add_subparsers(title="schedulers", metavar="SCHEDULER", required=True)
    slurm = kinds.add_parser("slurm", help="write sbatch files; submit nothing")
    _add_common(slurm, "NAME-slurm")
    slurm.add_argument("--python", metavar="PATH", help="Python on the nodes (default: this one)")
    slurm.set_defaults(command=_slurm)
    kubernetes = kinds.add_parser(
        "kubernetes", help="write SparkApplication, MPIJob and Job objects; apply nothing"
    )
    _add_common(kubernetes, "NAME-kubernetes")
    kubernetes.add_argument(
        "--claim", default="paceline", metavar="NAME", help="PersistentVolumeClaim of /shared"
    )
    kubernetes.add_argument(
        "--registry",
        default="",
        metavar="PREFIX",
        help="registry of the container images, ending in a slash",
    )
    kubernetes.add_argument("--namespace", metavar="NAME")
    kubernetes.add_argument("--service-account", default="spark", metavar="NAME")
    kubernetes.add_argument(
        "--memory-gib",
        type=positive,
        default=4.0,
        metavar="GIB",
        help="memory of a rank (default: 4)",
    )
    kubernetes.set_defaults(command=_kubernetes)


def _add_common(parser: argparse.ArgumentParser, out: str) -> None:
    parser.add_argument(
        "spec", metavar="SPEC", help="a TOML file, or the name of a shipped experiment"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"default: {out}")
    parser.add_argument(
        "--data-dir", metavar="DIR", help="folder on the nodes with a data set for each workload"
    )
    parser.add_argument("--run-dir", metavar="RUN_DIR", help="run directory on the nodes")
    parser.add_argument(
        "--cores",
        type=count,
        metavar="N",
        help="cores of a node, for `auto` (default: those of this machine)",
    )


def _slurm(arguments: argparse.Namespace) -> int:
    from paceline.launchers.schedulers.files import Places
    from paceline.launchers.schedulers.slurm import SlurmSettings, render_slurm
    from paceline.spec.data_names import is_remote

    experiment, trials = _planned(arguments)
    run_dir = arguments.run_dir or str(Path("runs", experiment.name).resolve())
    settings = SlurmSettings(
        places=Places(run_dir=run_dir, data_dir=arguments.data_dir),
        python=arguments.python or sys.executable,
    )
    for dataset in sorted({settings.places.dataset(trial) for trial in trials}):
        if dataset and not is_remote(dataset) and not Path(dataset).exists():
            print(
                f"paceline: note: {dataset} does not exist yet; make it with `paceline data "
                "synth` and `paceline data ingest` on storage that all nodes share (--data-dir)",
                file=sys.stderr,
            )
    out = arguments.out or Path(f"{experiment.name}-slurm")
    return _write(out, render_slurm(trials, settings))


def _kubernetes(arguments: argparse.Namespace) -> int:
    from paceline.launchers.schedulers.files import Places
    from paceline.launchers.schedulers.kubernetes import (
        MOUNT,
        KubernetesSettings,
        render_kubernetes,
    )

    experiment, trials = _planned(arguments)
    settings = KubernetesSettings(
        places=Places(
            run_dir=arguments.run_dir or f"{MOUNT}/runs/{experiment.name}",
            data_dir=arguments.data_dir or f"{MOUNT}/data",
        ),
        claim=arguments.claim,
        registry=arguments.registry,
        namespace=arguments.namespace,
        service_account=arguments.service_account,
        memory_gib=arguments.memory_gib,
    )
    out = arguments.out or Path(f"{experiment.name}-kubernetes")
    return _write(out, render_kubernetes(trials, settings))


def _planned(arguments: argparse.Namespace) -> tuple[Experiment, list[Trial]]:
    from paceline.runner import plan
    from paceline.spec import load_spec

    spec = load_spec(arguments.spec)
    experiment = spec.experiment
    searched = [t for t in experiment.trials if t.local_strategy == "best"]
    if searched:
        raise UsageError(
            f'{arguments.spec}: local_strategy "best" needs a search; run `paceline tune local '
            "SPEC` on a node first, and render the tuned.toml that it writes"
        )
    if experiment.repeats == "auto":
        raise UsageError(
            f'{arguments.spec}: repeats = "auto" needs `paceline run`, which looks at the ranking '
            "after each repeat; write a number to render jobs"
        )
    return experiment, plan(spec, arguments.cores).trials


def _write(out: Path, rendered: Rendered) -> int:
    from paceline.records.files import write_text

    for configuration, reason in rendered.left_out.items():
        print(f"paceline: left out {configuration}: {reason}", file=sys.stderr)
    if not rendered.files:
        raise UsageError("expected at least one trial that can be rendered, the spec has none")
    for name, text in rendered.files.items():
        write_text(out / name, text)
        print(out / name)
    return ExitCode.OK
