"""The outputs that pages show: what the commands above them print, apart from figures.

With PACELINE_WRITE_OUTPUTS=1 the commands run with the sizes of the pages, and the outputs on the
pages are written anew. Use an idle machine.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.functional.cli_runs import LIMIT_S, SMALL, Cli, trial
from tests.functional.monitored import monitored
from tests.support.commands import run_command
from tests.support.documentation import ROOT
from tests.support.environment import AS_ROOT
from tests.support.outputs import WRITES, compare_outputs, shown_outputs, without_places
from tests.support.waiting import wait_for
from tests.unit.show.monitor.recorded import make_recorded_run

from paceline.base.errors import ExitCode

pytestmark = [pytest.mark.functional, pytest.mark.timeout(900)]

README = ROOT / "README.md"
COMPARISON = ROOT / "docs/tutorials/first-comparison.md"
BACK_ENDS = ROOT / "docs/reference/back-ends.md"
MONITOR, OWN_TASK, TARGET, VERIFY = (
    ROOT / f"docs/how-to/{name}.md" for name in ("monitor", "own-task", "target", "verify")
)
HANGING = Path(__file__).parent / "programs/hanging.py"
PAGE_LIMIT_S = 800
_PART = re.compile(
    r"Save this as `(?P<file>[^`]+)`[^\n]*\n\n```\w+\n(?P<content>.*?)^```$"
    r"|^```console\n(?P<commands>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_SMALLER = {
    r"^repeats = \d+": "repeats = 1",
    # with the samples that are held out, the data set of `tiny_dataset`
    r'^name = "to-target"': 'name = "to-target"\nseed = 3',
    r"^samples = \d+": "samples = 24",
    r"^epochs = \d+": "epochs = 8",
    r"^max_steps = \d+": "max_steps = 20",  # fewer give a warning
    r"at_least = [\d.]+": "at_least = 0",
    r"--images \d+": "--images 64",
}


def _follow(page: Path, cli: Cli, *expected: ExitCode) -> dict[str, str]:
    """Save the files of a page, run its console blocks, and return their outputs."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    outputs = {}
    for part in _PART.finditer(page.read_text("utf-8")):
        if part["file"]:
            (cli.cwd / part["file"]).write_text(_sized(part["content"]), "utf-8")
            continue
        commands = _sized(part["commands"]).replace("./pacelinew", "paceline")
        environment = {**cli.environment, "PATH": programs}
        done = run_command(["bash", "-euc", commands], PAGE_LIMIT_S, env=environment, cwd=cli.cwd)
        assert done.returncode in (expected or (ExitCode.OK,)), done.stderr
        outputs[part["commands"].strip()] = without_places(done.stdout, cli.cwd)
    return outputs


def _sized(text: str) -> str:
    for usual, smaller in () if WRITES else _SMALLER.items():
        text = re.sub(usual, smaller, text, flags=re.MULTILINE)
    return text


def _compare_shown(page: Path, outputs: dict[str, str]) -> None:
    """Compare all outputs on a page with those of its commands."""
    compare_outputs(page, {commands: outputs[commands] for commands in shown_outputs(page)})


def test_the_comparison_page_shows_its_outputs_and_another_uses_its_data_set(paceline: Cli) -> None:
    _compare_shown(COMPARISON, _follow(COMPARISON, paceline))
    _follow(OWN_TASK, paceline)


@pytest.mark.parametrize("page", [TARGET, BACK_ENDS], ids=lambda page: page.stem)
def test_a_page_shows_its_outputs(paceline: Cli, page: Path) -> None:
    own = dataclasses.replace(paceline, environment={**paceline.environment, **AS_ROOT})
    _compare_shown(page, _follow(page, own))


def test_two_pages_show_a_bug_that_verify_finds(paceline: Cli) -> None:
    outputs = _follow(VERIFY, paceline, ExitCode.NOT_EQUIVALENT, ExitCode.OK)
    _compare_shown(VERIFY, outputs)
    found = next(iter(outputs.values()))
    compare_outputs(README, dict.fromkeys(shown_outputs(README), found))


@contextmanager
def _started(cli: Cli, spec: str) -> Iterator[None]:
    """Run a spec in the background, and end it."""
    (cli.cwd / "spec.toml").write_text(spec, "utf-8")
    run = cli.start("run", "spec.toml", "--out", "RUN_DIR", log=cli.cwd / "log")
    try:
        yield
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(LIMIT_S)


def _printed(cli: Cli, commands: str, words: str) -> dict[str, str]:
    """Return the output of a command, as soon as it contains these words."""

    def look() -> str | None:
        output = cli.main(*commands.split()[1:]).stdout
        return output if re.search(words, " ".join(output.split())) else None

    return {commands: without_places(wait_for(look, LIMIT_S, commands), cli.cwd)}


def test_watch_shows_the_trial_that_trains(paceline: Cli) -> None:
    values = {'"small"': '"my"', "max_steps = 20": "max_steps = 2000", "epochs = 8": "epochs = 900"}
    spec = SMALL
    for usual, other in values.items():
        spec = spec.replace(usual, other)
    with _started(paceline, spec):
        found = _printed(paceline, "paceline watch RUN_DIR --once", r"samples/s, loss .* IOWait")
    compare_outputs(MONITOR, found)


def test_stacks_shows_the_rank_that_hangs(paceline: Cli) -> None:
    shutil.copy(HANGING, paceline.cwd / "train.py")
    named = SMALL.replace('name = "tiny"\nsamples = 48', 'script = "train.py"')
    spec = re.sub(r"(?s)\[training\].*?(?=\[\[workloads)", "", named)
    spec += trial("torchrun", "gloo", arguments=["forward"])
    # no break within the path of the script
    wide = dataclasses.replace(paceline, environment={**paceline.environment, "COLUMNS": "300"})
    with _started(wide, spec):
        # Stacks of a rank that still imports can crash it: their frames change while C reads them.
        # The silence of its log is no sign of its end on a busy machine; the script's own file is.
        wait_for(lambda: any(wide.cwd.rglob("hangs")), LIMIT_S, "the hanging call of rank 1")
        sentence = r" for \d+ s; rank 1 has not begun it and is at \S+:\d+ in forward"
        found = _printed(wide, "paceline stacks RUN_DIR", sentence)
    compare_outputs(MONITOR, found)


def test_monitor_says_where_prometheus_is(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path / "recorded")
    programs = tmp_path / "bin"  # that do nothing; Grafana is not among them
    programs.mkdir()
    for name, seconds in {"prometheus": 600, "promtool": 0}.items():
        (programs / name).write_text(f"#!/bin/sh\nexec /bin/sleep {seconds}\n")
        (programs / name).chmod(0o755)
    with monitored(run.root, path=str(programs)) as monitor:
        wait_for(lambda: "Ctrl-C" in monitor.log, LIMIT_S, "the last message")
        compare_outputs(MONITOR, {"paceline monitor RUN_DIR": monitor.log})
