"""`paceline tune`: searches for the fastest settings, and for the largest batch."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from paceline.cli.console import print_json
from paceline.cli.findings import print_batch_findings, print_findings
from paceline.cli.options import (
    all_of,
    count,
    existing_run,
    json_option,
    limit_option,
    out_option,
    spec_argument,
    trust_option,
)
from paceline.cli.progress import ConsoleProgress
from paceline.cli.streams import continued_by
from paceline.measure.records.files import read_json
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.loading import Spec, load_spec
from paceline.runner.trials.directory import default_run_dir, recorded_spec
from paceline.runner.tune.batch import tune_batch
from paceline.runner.tune.comm import tune_comm
from paceline.runner.tune.local import tune_local


@click.group("tune")
def command() -> None:
    """Find the fastest settings, or the largest batch, by short trials."""


_takes_search = all_of(
    click.argument("spec", metavar="[SPEC]", required=False),
    out_option("DIR", "Write the search here; default: runs/NAME-tune…-DATE-TIME."),
    click.option(
        "--resume", metavar="DIR", type=existing_run,
        help="Continue the search in this directory, with its own spec.",
    ),
    trust_option,
    limit_option("Start no short trial after this time."),
    json_option,
)  # fmt: skip


@command.command("local")
@_takes_search
def local(**options: Any) -> None:
    """Tune each local strategy on this node; write a spec with the winners.

    SPEC is a TOML file, or the name of a shipped experiment.
    """
    _search("local", "tune", tune_local, **options)


@command.command("comm")
@_takes_search
def comm(**options: Any) -> None:
    """Tune the gradient communication of each trial; write a spec with the winners.

    SPEC is a TOML file, or the name of a shipped experiment.
    """
    _search("comm", "tune-comm", tune_comm, **options)


def _search(
    action: str,
    suffix: str,
    search: Callable[..., Any],
    *,
    spec: str | None,
    out: Path | None,
    resume: Path | None,
    trust_run: bool,
    limit_s: float | None,
    as_json: bool,
) -> None:
    """Search, and show what was found."""
    checked, files = _searched(spec, out, resume, suffix, trust_run=trust_run)
    how = f"Continue with: paceline tune {action} --resume {shlex.quote(str(files.root))}"
    with (
        continued_by(lambda: how, files.manifest, made=files.root),
        ConsoleProgress() as progress,
    ):
        found = search(
            checked, files.root, resume=resume is not None, progress=progress, budget_s=limit_s
        )
    if as_json:
        print_json(read_json(files.tuning))
    else:
        print_findings(found)
        print(f"\nnext: paceline run {files.tuned_spec}")


@command.command("batch")
@spec_argument
@out_option("DIR", "Write the search here; default: runs/NAME-tune-batch-DATE-TIME.")
@click.option(
    "--memory",
    "memory_mib",
    metavar="MIB",
    type=count,
    help="Memory of the ranks of a trial; default: 80 % of what is available.",
)
@json_option
def batch(spec: str, out: Path | None, memory_mib: int | None, as_json: bool) -> None:  # fmt: skip
    """Find the largest batch of each trial that fits into memory.

    SPEC is a TOML file, or the name of a shipped experiment.
    """
    checked = load_spec(spec)
    run_dir = out or default_run_dir(f"{checked.experiment.name}-tune-batch")
    with ConsoleProgress() as progress:
        found = tune_batch(checked, run_dir, memory_mib=memory_mib, progress=progress)
    if as_json:
        print_json(read_json(RunFiles(run_dir).batch))
    else:
        print_batch_findings(found)


def _searched(
    spec: str | None, out: Path | None, resume: Path | None, suffix: str, *, trust_run: bool
) -> tuple[Spec, RunFiles]:
    """Return the spec and the directory of a search."""
    if (spec is None) == (resume is None) or (resume is not None and out is not None):
        raise click.UsageError(
            "expected SPEC, or --resume DIR without SPEC and --out, because the directory holds "
            "its spec"
        )
    if resume is not None:
        return recorded_spec(resume, trust_run=trust_run), RunFiles(resume)
    checked = load_spec(spec or "")
    default = default_run_dir(f"{checked.experiment.name}-{suffix}")
    return checked, RunFiles(out or default)
