"""`paceline run`: an experiment or a script, its table and its report."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import click

from paceline import api
from paceline.api import Run
from paceline.base.errors import NotComparable
from paceline.cli.compare import print_table
from paceline.cli.console import plain_console, print_json
from paceline.cli.experiment import ExperimentCommand, ExperimentRequest, takes_experiment
from paceline.cli.findings import print_findings
from paceline.cli.options import existing_run, json_option, out_option, positive, trust_option
from paceline.cli.plan import show_plan
from paceline.cli.progress import ConsoleProgress
from paceline.cli.streams import continued_by, reader_may_end
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.loading import Spec, shipped_experiments
from paceline.runner.preflight.load import wait_until_idle
from paceline.runner.trials.copies import copied_at_end
from paceline.runner.trials.directory import (
    default_run_dir,
    extended_spec,
    recorded_spec,
)
from paceline.runner.trials.run_trial import failure_of_all, how_to_continue
from paceline.show.report.verdict import comparison_document, next_commands


@click.command("run", cls=ExperimentCommand)
@takes_experiment
@out_option(
    "RUN_DIR",
    "Write the run here; default: runs/NAME-DATE-TIME. To a URL (hdfs, s3, gs) the run is "
    "copied at the end.",
    remote=True,
)
@click.option(
    "--resume",
    metavar="RUN_DIR",
    type=existing_run,
    help="Run the failed and missing trials of this run, with its own spec. With --repeats N, also "
    "run the further repeats of all its configurations, until each has N.",
)
@click.option(
    "--add",
    "added",
    metavar="KEY=VALUE,…",
    multiple=True,
    help="With --resume: also run a further configuration, given by the keys of a [[trials]] entry "
    'in TOML, as in \'launcher="local", local_strategy="threads"\'; may be repeated.',
)
@trust_option
@click.option(
    "--changed-script",
    is_flag=True,
    help="With --resume: continue although the script, its imports or the file of the task have "
    "changed since trials ran. The table names the older trials.",
)
@click.option(
    "--when-idle",
    "idle_limit_s",
    metavar="SECONDS",
    type=positive,
    help="Wait until other processes use at most 10 % of the cores, at most so long.",
)
@click.option("--dry-run", is_flag=True, help="Show what would run, as `paceline plan`.")
@click.option(
    "-x",
    "--exit-first",
    is_flag=True,
    help="End the run with the first failed trial; default: go on if there are several "
    "configurations.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.option("-v", "--verbose", is_flag=True, help="Show where the log of each trial is.")
@json_option
def command(
    request: ExperimentRequest,
    out: Path | str | None,
    resume: Path | None,
    added: tuple[str, ...],
    trust_run: bool,
    changed_script: bool,
    idle_limit_s: float | None,
    dry_run: bool,
    exit_first: bool,
    quiet: bool,
    verbose: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Run an experiment or a training script, and compare.

    SPEC is a TOML file, or the name of a shipped experiment. A SCRIPT.py runs unchanged, as
    torchrun would run it; all words after its name are its own. Lists are separated by commas.
    """
    for option, given in (("--changed-script", changed_script), ("--add", added)):
        if given and resume is None:
            raise click.UsageError(f"{option}: expected --resume beside it; leave it out")
    if resume is None:
        spec = request.load()
    else:
        spec = _resumed(resume, request, out, added=added, trust_run=trust_run)
    if dry_run:
        show_plan(spec, as_json=as_json, commands=False)
        return
    url = out if isinstance(out, str) else None
    chosen = out if isinstance(out, Path) else None
    run_dir = resume or chosen or default_run_dir(spec.experiment.name)
    progress, files = ConsoleProgress(quiet=quiet, verbose=verbose), RunFiles(run_dir)
    how = partial(how_to_continue, files)
    with copied_at_end(files, url):
        with (
            continued_by(how, files.manifest, files.tune.manifest, made=run_dir),
            progress,
        ):
            if idle_limit_s is not None:
                wait_until_idle(idle_limit_s, progress.stage)
            finished = api.run(
                spec,
                run_dir,
                resume=resume is not None,
                trust_run=trust_run,
                keep_going=False if exit_first else None,
                changed_script=changed_script,
                progress=progress,
            )
        _show(finished, as_json=as_json)


def _resumed(
    run_dir: Path,
    request: ExperimentRequest,
    out: Path | str | None,
    *,
    added: tuple[str, ...],
    trust_run: bool,
) -> Spec:
    """Return the spec of a run to resume, with the repeats and trials that it gets."""
    if request.has_own_spec or out is not None:
        raise click.UsageError(
            f"--resume {run_dir}: expected no SPEC, no --out and no changes of the spec but "
            "--repeats and --add, because the run directory holds its spec; leave them out, or "
            "start a new run without --resume"
        )
    repeats = request.repeats
    if repeats is None and not added:
        return recorded_spec(run_dir, trust_run=trust_run)
    if repeats is not None and not repeats.isdecimal():
        raise click.UsageError(
            f"--repeats {repeats}: expected a number with --resume, so many repeats of each "
            "configuration in all"
        )
    number = None if repeats is None else int(repeats)
    return extended_spec(run_dir, repeats=number, added=added, trust_run=trust_run)


def _show(finished: Run, *, as_json: bool) -> None:
    """Print the result, and raise the failure of its trials."""
    with reader_may_end("stdout"):  # report and exit code do not depend on it
        if finished.search is not None and not as_json:
            print_findings(finished.search)
        if not finished.failed:
            _show_comparison(finished, as_json=as_json)
            return
        with suppress(NotComparable):  # no trial has finished
            _show_comparison(finished, as_json=as_json)
    raise failure_of_all(finished.failed, finished.files)


def _show_comparison(run: Run, *, as_json: bool) -> None:
    if as_json:
        print_json(comparison_document(run.comparison))
        print(f"report: {run.to_html()}", file=sys.stderr)
        return
    print_table(run.comparison, verdict_last=True)
    print(f"\nreport: {run.to_html()}")
    console = plain_console()
    if console.is_terminal:  # the last line of a log is the report
        is_shipped = run.comparison.experiment in shipped_experiments()
        for command, purpose in next_commands(run.comparison, run.path, is_shipped=is_shipped):
            console.print(f"{purpose}:\n  {command}", soft_wrap=True)
    sys.stdout.flush()
