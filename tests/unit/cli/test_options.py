"""Arguments and options that several verbs share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from tests.unit.analysis import fabricate

from paceline.base.errors import ExitCode
from paceline.cli import main, options
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles


def given(option: Any, *words: str) -> Any:
    """Return what a command gets for its only option."""
    received = []

    @click.command()
    @option
    def command(**values: Any) -> None:
        received.append(values)

    ended = CliRunner().invoke(command, words)
    assert ended.exit_code == 0, ended.output
    (value,) = received[0].values()
    return value


def test_list_has_commas_and_a_repeated_option_adds_to_it() -> None:
    option = options.list_option("--only", "A,B", "help")
    assert given(option) == ()
    assert given(option, "--only", "a, b,", "--only", "c") == ("a", "b", "c")


@pytest.mark.parametrize("word", ["nan", "inf", "0", "-1", "x"])
def test_limit_is_a_finite_positive_number(word: str) -> None:
    @click.command()
    @options.limit_option("help")
    def command(limit_s: float) -> None:
        pytest.fail(f"got {limit_s}")

    assert CliRunner().invoke(command, ["--limit", word]).exit_code == ExitCode.USAGE


def test_run_that_began_last_is_the_default(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("b", "c", "a")):
        fabricate.make_run(tmp_path / "runs" / name, [fabricate.SEQUENTIAL, fabricate.MPI])
        manifest = RunFiles(tmp_path / "runs" / name).manifest
        write_json(manifest, {"spec_toml": ""})
        os.utime(manifest, (number, number))
    (tmp_path / "runs" / "other").mkdir()
    for verb in ("compare", "explain", "report", "profile", "watch --once"):
        assert main(verb.split()) == ExitCode.OK, verb
        shown = capsys.readouterr()
        assert shown.err.startswith(f"paceline: newest run: {Path('runs', 'a')}\n"), verb


def test_newest_run_to_compare_has_timed_trials(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = ("run", "watch", "verify", "failed", "begun")
    for number, kind in enumerate(kinds):
        run = fabricate.make_run(Path("runs", kind), [fabricate.SEQUENTIAL, fabricate.MPI])
        write_json(run.manifest, {} if kind == "watch" else {"spec_toml": ""})
        for _, files in run.trials():
            if kind == "verify":
                fabricate.edit_json(
                    files.trial, training={"script": {"observe": {"reference": None}}}
                )
            elif kind == "failed":
                fabricate.edit_json(files.outcome, status="failed")
            elif kind == "begun":
                files.outcome.unlink()
        os.utime(run.manifest, (number, number))
    assert options.newest_run() == Path("runs/begun")
    assert options.newest_run(to_compare=True) == Path("runs/run")
    for verb in ("compare", "explain"):
        capsys.readouterr()
        assert main([verb]) == ExitCode.OK
        assert capsys.readouterr().err.startswith("paceline: newest run: runs/run\n")


def test_search_before_a_run_counts(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare"]) == ExitCode.USAGE
    assert "expected RUN_DIR" in capsys.readouterr().err
    write_json(RunFiles(Path("runs/searched")).tune.manifest, {})
    assert options.newest_run() == Path("runs/searched")


@pytest.mark.parametrize(
    "verb",
    ["compare", "explain", "report", "profile", "predict", "watch",
     "monitor", "export --to csv", "run --resume"],
)  # fmt: skip
def test_mistyped_run_directory_is_refused_at_once(verb, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/first-1").mkdir(parents=True)
    assert main([*verb.split(), "runs/frist-1"]) == ExitCode.USAGE
    shown = " ".join(capsys.readouterr().err.split())
    assert "runs/frist-1: expected a run directory, found none. Did you mean runs/first-1?" in shown


def test_remote_place_is_only_for_options_that_allow_it(tmp_path: Path) -> None:
    anywhere = options.out_option("PLACE", "help", remote=True)
    assert given(anywhere, "--out", "s3://bucket/run") == "s3://bucket/run"
    assert given(anywhere, "--out", str(tmp_path)) == tmp_path
    for option, url in ((anywhere, "ftp://host/run"), (options.out_option("D", "h"), "s3://b/run")):
        ended = CliRunner().invoke(click.command()(option(lambda **_: None)), ["--out", url])
        assert ended.exit_code == ExitCode.USAGE
        assert f"{url}: expected a path" in ended.output


def test_remote_run_is_not_read_and_the_command_that_fetches_it_is_named(capsys) -> None:
    assert main(["compare", "s3://bucket/runs/a"]) == ExitCode.USAGE
    assert "aws s3 cp --recursive s3://bucket/runs/a a" in capsys.readouterr().err
