"""The commands. Each imports only what it needs, so that `--help` is quick."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.table import Table

from paceline.cli.console import plain_console, print_json
from paceline.cli.streams import reader_may_end
from paceline.errors import ExitCode, NotComparable, UsageError
from paceline.host.garbage import permanent_objects
from paceline.records.files import write_json
from paceline.records.layout import RunFiles
from paceline.records.rows import SCHEMA

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from paceline.analysis.comparison import Comparison
    from paceline.api import Run
    from paceline.export.run_data import RunData
    from paceline.runner import DiskUse
    from paceline.spec import Spec


_HOUR_S = 3600


def run(arguments: argparse.Namespace) -> int:
    with permanent_objects():
        from paceline import api
        from paceline.cli.findings import print_findings
        from paceline.cli.progress import ConsoleProgress
        from paceline.runner import failure_of_all

    spec = _changed_spec(arguments)
    with ConsoleProgress() as progress:
        finished = api.run(
            spec,
            arguments.out,
            resume=arguments.resume,
            keep_going=arguments.keep_going,
            progress=progress,
        )
    with reader_may_end("stdout"):  # report and exit code do not depend on it
        if finished.search is not None:
            print_findings(finished.search)
        if not finished.failed:
            _show_comparison(finished)
            return ExitCode.OK
        with suppress(NotComparable):  # no trial has finished
            _show_comparison(finished)
    raise failure_of_all(finished.failed, finished.files)


def _changed_spec(arguments: argparse.Namespace) -> Spec:
    """Return the spec with the changes of --set, --only and --repeats."""
    from paceline.cli.script import script_experiment
    from paceline.spec import load_spec

    settings = list(arguments.set)
    if arguments.repeats is not None:
        number = arguments.repeats
        settings.append(f"repeats={number if number.isdecimal() else json.dumps(number)}")
    if arguments.only:
        settings.append(f"only={json.dumps(arguments.only, ensure_ascii=False)}")
    return load_spec(script_experiment(arguments) or arguments.spec, settings)


def tune_local(arguments: argparse.Namespace) -> int:
    from paceline import runner
    from paceline.cli.findings import print_findings
    from paceline.cli.progress import ConsoleProgress
    from paceline.spec import load_spec
    from paceline.tune.local import tune_local as search

    spec = load_spec(arguments.spec)
    run_dir = arguments.out or runner.default_run_dir(f"{spec.experiment.name}-tune")
    with ConsoleProgress() as progress:
        findings = search(
            spec,
            run_dir,
            resume=arguments.resume,
            progress=progress,
            budget_s=arguments.budget,
        )
    print_findings(findings)
    print(f"\nnext: paceline run {RunFiles(run_dir).tuned_spec}")
    return ExitCode.OK


def tune_comm(arguments: argparse.Namespace) -> int:
    from paceline import runner
    from paceline.cli.comm_findings import print_comm_findings
    from paceline.cli.progress import ConsoleProgress
    from paceline.spec import load_spec
    from paceline.tune.comm import tune_comm as search

    spec = load_spec(arguments.spec)
    run_dir = arguments.out or runner.default_run_dir(f"{spec.experiment.name}-tune-comm")
    with ConsoleProgress() as progress:
        found = search(
            spec,
            run_dir,
            resume=arguments.resume,
            progress=progress,
            budget_s=arguments.budget,
        )
    print_comm_findings(found)
    print(f"\nnext: paceline run {RunFiles(run_dir).tuned_spec}")
    return ExitCode.OK


def tune_batch(arguments: argparse.Namespace) -> int:
    from paceline import runner
    from paceline.cli.batch_findings import print_batch_findings
    from paceline.cli.progress import ConsoleProgress
    from paceline.records.files import read_json
    from paceline.spec import load_spec
    from paceline.tune.batch import tune_batch as search

    spec = load_spec(arguments.spec)
    run_dir = arguments.out or runner.default_run_dir(f"{spec.experiment.name}-tune-batch")
    with ConsoleProgress() as progress:
        found = search(spec, run_dir, memory_mib=arguments.memory, progress=progress)
    if arguments.json:
        print_json(read_json(RunFiles(run_dir).batch))
    else:
        print_batch_findings(found)
    return ExitCode.OK


def plan(arguments: argparse.Namespace) -> int:
    with permanent_objects():
        from paceline.api import Plan

    spec = _changed_spec(arguments)
    if spec.experiment.tune is not None:
        return _plan_search(arguments, spec)
    planned = Plan(spec)
    if arguments.json:
        print_json(
            {
                "schema": SCHEMA,
                "experiment": planned.experiment.name,
                "data": dict(planned.datasets),
                "trials": [
                    {**trial.model_dump(mode="json"), "command": planned.commands[trial.id]}
                    for trial in planned.trials
                ],
                "disk_use": dataclasses.asdict(planned.disk_use),
            }
        )
        return ExitCode.OK
    for number, (trial_id, line) in enumerate(planned.commands.items(), start=1):
        print(f"# {number}/{len(planned.commands)} {trial_id}\n{line}")
    print(f"# {_disk_use_sentence(planned.disk_use)}")
    return ExitCode.OK


def _disk_use_sentence(use: DiskUse) -> str:
    """Return the predicted disk use in MB, with the traces for each hour of training."""
    from paceline.report.wording import megabytes

    kept, most = megabytes(use.kept_bytes), megabytes(use.peak_bytes())
    traces_kept = megabytes(_HOUR_S * use.trace_kept_bytes_per_s)
    traces = megabytes(_HOUR_S * use.trace_training_bytes_per_s)
    return (
        f"disk: {kept} MB after the run, up to {most} MB while it trains; each hour of training "
        f"adds {traces_kept} MB of traces, {traces} MB until the end of the trial"
    )


def _plan_search(arguments: argparse.Namespace, spec: Spec) -> int:
    from paceline.cli.findings import print_search_plan, search_plan_json
    from paceline.tune.local import plan_local

    search_plan = plan_local(spec)
    if arguments.json:
        print_json(search_plan_json(search_plan))
    else:
        print_search_plan(search_plan)
    return ExitCode.OK


def compare(arguments: argparse.Namespace) -> int:
    from paceline.analysis.compare import no_finished_baseline

    run = _existing_run(arguments.run_dir, arguments.baseline)
    if arguments.second is not None:
        return _compare_two(run.files, _existing_run(arguments.second).files, arguments)
    comparison = run.comparison
    if arguments.json:
        print_json(comparison.to_json())
    else:
        _print_table(comparison)
        if arguments.baseline is None:
            write_json(run.files.comparison, comparison.to_json())
    if not comparison.baselines:
        raise no_finished_baseline(run.files)
    return ExitCode.OK


def _compare_two(first: RunFiles, second: RunFiles, arguments: argparse.Namespace) -> int:
    from paceline.cli.runs import show_runs

    if arguments.baseline is not None:
        raise UsageError("--baseline: expected one run, got two; leave it out to compare two runs")
    show_runs(first, second, as_json=arguments.json)
    return ExitCode.OK


def history(arguments: argparse.Namespace) -> int:
    from paceline.cli.runs import show_history

    show_history(arguments.dir, as_json=arguments.json)
    return ExitCode.OK


def profile(arguments: argparse.Namespace) -> int:
    from paceline.cli.profile import show_profile

    show_profile(
        _existing_run(arguments.run_dir),
        trial_id=arguments.trial,
        as_json=arguments.json,
    )
    return ExitCode.OK


def report(arguments: argparse.Namespace) -> int:
    with permanent_objects():
        from paceline.api import load

    print(load(arguments.run_dir, baseline=arguments.baseline).to_html(arguments.output))
    return ExitCode.OK


def data_synth(arguments: argparse.Namespace) -> int:
    from paceline.cli.progress import data_progress
    from paceline.data.synth import synthesise

    with data_progress("images") as progress:
        synthesise(arguments.out_dir, arguments.preset, arguments.images, arguments.seed, progress)
    print(arguments.out_dir)
    return ExitCode.OK


def data_ingest(arguments: argparse.Namespace) -> int:
    from paceline.cli.progress import data_progress
    from paceline.data.ingest import ingest

    with data_progress("images") as progress:
        manifest = ingest(
            arguments.images_dir,
            arguments.out_dataset,
            on_bad_image=arguments.on_bad_image,
            seed=arguments.seed,
            progress=progress,
        )
    for skipped in manifest.skipped:
        print(f"paceline: skipped {skipped.path}: {skipped.reason}", file=sys.stderr)
    print(f'{manifest.summary}; use it with data = "{arguments.out_dataset}"')
    return ExitCode.OK


def data_register(arguments: argparse.Namespace) -> int:
    from paceline.cli.progress import data_progress
    from paceline.data.register import register

    pairs = [text.partition("=") for text in arguments.codec]
    for name, sign, codec in pairs:
        if not (name and sign and codec):
            raise UsageError(f"--codec {name}{sign}{codec}: expected NAME=CODEC")
    with data_progress("files") as progress:
        manifest = register(
            arguments.dataset,
            manifest_dir=arguments.manifest_dir,
            codecs={name: codec for name, _, codec in pairs},
            progress=progress,
        )
    for name, reason in manifest.ignored.items():
        print(f"paceline: column {name} cannot be used: {reason}", file=sys.stderr)
    print(arguments.manifest_dir or arguments.dataset)
    return ExitCode.OK


def data_inspect(arguments: argparse.Namespace) -> int:
    from paceline.data.dataset import inspect_dataset

    facts = inspect_dataset(arguments.dataset)
    if arguments.json:
        print_json(facts)
    else:
        _print_facts(facts)
    return ExitCode.OK


def doctor(arguments: argparse.Namespace) -> int:
    from paceline.cli.doctor import examine

    findings = examine()
    if arguments.json:
        print_json({"schema": SCHEMA, "findings": [f.to_json() for f in findings]})
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("", "what", "in use", "why, or how to get it"):
            table.add_column(column, overflow="fold")
        for finding in findings:
            table.add_row("ok" if finding.ok else "--", finding.what, finding.found, finding.why)
        plain_console().print(table)
    return ExitCode.OK if all(f.ok for f in findings) else ExitCode.ENVIRONMENT


def run_sidecar(arguments: argparse.Namespace) -> int:
    from paceline.telemetry.request import request_from
    from paceline.telemetry.sidecar import run_sidecar

    run_sidecar(request_from(arguments))
    return ExitCode.OK


def _existing_run(run_dir: Path, baseline: str | None = None) -> RunData:
    with permanent_objects():
        from paceline.export.run_data import RunData

    return RunData(RunFiles(run_dir), baseline)


def _show_comparison(run: Run) -> None:
    write_json(run.files.comparison, run.comparison.to_json())
    _print_table(run.comparison)
    print(f"\nreport: {run.to_html()}", flush=True)


def _print_table(comparison: Comparison) -> None:
    from paceline.report.table import comparison_view

    console = plain_console()
    console.print(comparison_view(comparison, console.width))


def _print_facts(facts: dict[str, Any], indent: str = "") -> None:
    for key, value in facts.items():
        if isinstance(value, dict):
            print(f"{indent}{key}:")
            _print_facts(value, indent + "  ")
        else:
            print(f"{indent}{key}: {'none' if value in (None, [], ()) else value}")
