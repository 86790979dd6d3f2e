"""`paceline run` on a terminal: a ranking while it goes on, a clean screen afterwards."""

from __future__ import annotations

import re

import pytest
from tests.functional.cli_runs import NO_SIDECAR, THREADS, Cli, slowed, small
from tests.support.terminal import Program

from paceline.base.errors import ExitCode

pytestmark = [pytest.mark.functional, pytest.mark.timeout(300)]

SPEC = small(image_size=64).replace(*NO_SIDECAR) + THREADS
LIMIT_S = 120
COLUMNS = 80


@pytest.fixture
def start(paceline, tmp_path):
    programs = []

    def run(cli: Cli, *arguments: str) -> Program:
        (tmp_path / "small.toml").write_text(SPEC, "utf-8")
        environment = {**cli.environment, "TERM": "xterm-256color"}
        del environment["COLUMNS"]  # the terminal knows
        argv = cli.argv("run", "small.toml", "--out", "run", *arguments)
        programs.append(Program(argv, environment, tmp_path, COLUMNS))
        return programs[-1]

    yield run
    for program in programs:
        program.close()


def test_run_ends_with_verdict_report_and_a_command(start, paceline):
    program = start(paceline)
    program.read_until(lambda text: "1 of 2 trials done" in text and "1 (base)" in text, LIMIT_S)
    live = program.screen.text
    assert "threads, repeat 1" in live or "threads 2\u00d71, repeat 1" in live
    assert "Ctrl-C stops" in live
    assert program.end(LIMIT_S) == ExitCode.OK
    text = program.screen.text
    assert "Ctrl-C stops" not in text
    assert "trials done" not in text
    assert program.screen.cursor_is_shown
    assert not program.screen.has_colours  # NO_COLOR
    lines = text.splitlines()
    assert max(map(len, lines)) <= COLUMNS
    words = ("tiny: No verdict", "report: run/report.html", "To measure more repeats")
    places = [next(n for n, line in enumerate(lines) if line.startswith(each)) for each in words]
    assert places == sorted(places)
    assert lines[-2:] == [
        "To measure more repeats, which may decide:",
        "  paceline run --resume run --repeats 5",
    ]


def test_ctrl_c_leaves_a_clean_screen(start, paceline):
    program = start(slowed(paceline, 0.5))
    program.read_until(lambda text: "of 2 trials done" in text and "repeat 1" in text, LIMIT_S)
    program.type("\x03")
    assert program.end(LIMIT_S) == ExitCode.INTERRUPTED
    lines = program.screen.text.splitlines()
    assert lines[-3].endswith("paceline: interrupted")
    assert lines[-2] == "0 of 2 trials done. Continue with: paceline run --resume run"
    assert re.fullmatch(r"On disk: \d+\.\d MB\. To remove it: rm -r run", lines[-1])
    assert not any("Ctrl-C stops" in line or "repeat 1" in line for line in lines)
    assert program.screen.cursor_is_shown
