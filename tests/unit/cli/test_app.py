"""Errors become messages and exit codes in `main`; signals end a command in order."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.unit.analysis import fabricate

from paceline.base.errors import DataError, ExitCode
from paceline.cli import doctor, main
from paceline.cli.app import app
from paceline.cli.console import plain_console
from paceline.cli.doctor import MachineFinding
from paceline.cli.streams import signals_raise
from paceline.measure.records.layout import RunFiles


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """Run `paceline doctor` with another body."""

    def run(body: Callable[[], object]) -> int:
        monkeypatch.setattr(doctor, "examine", body)
        return main(["doctor"])

    return run


def raising(error: BaseException) -> Callable[[], object]:
    def body() -> object:
        raise error

    return body


def test_error_of_the_file_system_is_a_message_with_the_file(command, capsys) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/x/manifest.json")
    assert command(raising(full)) == ExitCode.ENVIRONMENT
    said = capsys.readouterr().err
    assert said.startswith("paceline: /runs/x/manifest.json: No space left on device; free some")
    assert "Traceback" not in said


def test_error_of_the_file_system_can_show_its_stack_trace(command, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_TRACEBACK", "1")
    with pytest.raises(PermissionError):
        command(raising(PermissionError(errno.EACCES, "Permission denied", "/x")))


def test_user_error_has_its_own_exit_code(command, capsys) -> None:
    assert command(raising(DataError("x: expected y"))) == ExitCode.DATA
    assert capsys.readouterr().err == "paceline: x: expected y\n"


def test_fault_of_paceline_itself_is_not_hidden(command) -> None:
    with pytest.raises(ZeroDivisionError):
        command(raising(ZeroDivisionError()))


@pytest.fixture
def misread(tmp_path, monkeypatch) -> RunFiles:
    """An undamaged run, the newest in `runs/`; reading commands fail on it unexpectedly."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    run = fabricate.make_run(tmp_path / "runs/one", [fabricate.SEQUENTIAL, fabricate.MPI])
    monkeypatch.setattr("paceline.cli.profile.RunData", fail)
    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.parametrize("words", [["profile", "runs/one"], ["profile"]])
def test_error_on_an_undamaged_run_is_one_of_paceline(misread, words) -> None:
    with pytest.raises(ZeroDivisionError):
        main(words)


@pytest.mark.parametrize("words", [["profile", "runs/one"], ["profile"]])
def test_error_on_records_that_contradict_each_other_names_the_file(
    misread, words, monkeypatch, capsys
) -> None:
    files, _ = fabricate.pair_of(misread)
    steps = files.rank(1).steps
    steps.write_bytes(2 * steps.read_bytes())
    assert main(words) == ExitCode.DATA
    said = capsys.readouterr().err
    assert f"{steps.relative_to(Path.cwd())}: expected each step once" in said
    assert "Traceback" not in said
    monkeypatch.setenv("PACELINE_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(words)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, ExitCode.TERMINATED), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)
def test_signal_runs_the_clean_up_and_exits_with_128_plus_its_number(
    command, capsys, number, status
) -> None:
    cleaned = []
    inherited = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup

    def body() -> None:
        try:
            os.kill(os.getpid(), number)
            signal.sigtimedwait([], 5)  # the handler runs before this returns
        finally:
            cleaned.append(True)

    try:
        with pytest.raises(SystemExit) as ended:
            command(body)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, inherited)
    assert ended.value.code == status
    assert cleaned == [True]
    assert capsys.readouterr().err == f"paceline: ended by {number.name}\n"


_TWO_SIGNALS = """
import signal, sys, time
from types import SimpleNamespace
from paceline.cli import doctor
from paceline.cli import main
from paceline.cli import streams

now_s = 100.0
streams.time = SimpleNamespace(monotonic=lambda: now_s)

def examine():
    global now_s
    try:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(10.0)
    finally:
        now_s += float(sys.argv[1])
        signal.raise_signal(signal.SIGINT)
        print("cleaned", flush=True)

doctor.examine = examine
main(["doctor"])
"""


@pytest.mark.parametrize(
    ("pause_s", "status", "printed", "said"),
    [
        (0.0, 143, "cleaned\n", "paceline: ended by SIGTERM\n"),
        (5.0, 130, "", "paceline: ended by a second signal, SIGINT, without clean-up\n"),
    ],
)
def test_second_signal_ends_at_once(pause_s, status, printed, said) -> None:
    """Two signals within a second are one request: `timeout` sends two."""
    ended = subprocess.run(
        [sys.executable, "-c", _TWO_SIGNALS, str(pause_s)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, printed, said)


def test_error_of_the_clean_up_after_a_signal_is_not_shown(command, capsys) -> None:
    def body() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    assert command(body) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "paceline: interrupted\n"


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_every_exit_code_is_in_the_help(capsys) -> None:
    assert main(["--help"]) == ExitCode.OK
    text = " ".join(capsys.readouterr().out.split())
    for code in ExitCode:
        assert f"{code:d} {code.meaning}" in text


def test_brackets_and_colons_are_printed_as_they_are(capsys) -> None:
    plain_console().print("[mpi] mpirun :warning: [/x]")
    assert capsys.readouterr().out == "[mpi] mpirun :warning: [/x]\n"


def test_doctor_prints_spec_keys_in_brackets(monkeypatch, capsys) -> None:
    missing = MachineFinding(
        what="[bold]MPI", ok=False, found="missing", why="set [mpi] mpirun or PATH"
    )
    monkeypatch.setattr("paceline.cli.doctor.examine", lambda: [missing])
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == ExitCode.ENVIRONMENT
    printed = capsys.readouterr().out
    assert "[bold]MPI" in printed
    assert "set [mpi] mpirun or PATH" in printed


def verbs() -> list[tuple[str, click.Command]]:
    """Return all commands by the words that run them."""
    context = click.Context(app)
    found = []
    for name in (*app.commands, "lab"):
        verb = app.get_command(context, name)
        assert verb is not None
        found.append((name, verb))
        if isinstance(verb, click.Group):
            found += [(f"{name} {action}", each) for action, each in verb.commands.items()]
    return found


def test_help_of_a_verb_begins_with_its_line_in_the_list() -> None:
    for name, verb in verbs():
        if name in app.commands:
            assert (verb.help or "").partition("\n\n")[0].replace("\n", " ") == (
                app.commands[name].short_help
            )


def test_every_command_and_option_has_a_help_text_of_80_columns() -> None:
    runner = CliRunner()
    for name, verb in verbs():
        without = [
            option.name
            for option in verb.params
            if isinstance(option, click.Option) and not option.help
        ]
        assert without == [], name
        assert verb.help, name
        shown = runner.invoke(app, [*name.split(), "--help"])
        assert shown.exit_code == 0
        assert max(map(len, shown.output.splitlines())) <= 80, name


def test_lab_is_not_in_the_help(capsys) -> None:
    main(["--help"])
    assert "lab " not in capsys.readouterr().out
    assert main(["lab", "--help"]) == ExitCode.OK


def test_no_command_is_answered_with_the_help(capsys) -> None:
    assert main([]) == ExitCode.USAGE
    assert "Read results:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["comapre"], "Did you mean 'compare'?"),
        (["run", "quickstart", "--onyl", "x"], "'--only'"),
        (["tune", "lokal"], "Did you mean 'local'?"),
        (["doctor", "now"], "unexpected extra argument (now)"),
        (["show", "quickstrat"], 'Did you mean "quickstart"?'),
        (["list", "strategy"], "'strategy' is not one of"),
        (["run"], "expected SPEC"),
        (["data", "register", "x", "--codec", "foo"], "expected NAME=CODEC, got 'foo'"),
    ],
)
def test_mistyped_words_are_wrong_usage_with_a_suggestion(capsys, words, expected) -> None:
    assert main(words) == ExitCode.USAGE
    shown = capsys.readouterr()
    assert (shown.out, "Traceback" in shown.err) == ("", False)
    assert expected in shown.err
    known = [word for word in words[:2] if word in ("run", "tune", "data", "register", "doctor")]
    assert shown.err.startswith(" ".join(["Usage: paceline", *known]))


def test_shell_completes_verbs() -> None:
    environment = {
        **os.environ,
        "_PACELINE_COMPLETE": "bash_complete",
        "COMP_WORDS": "paceline ren",
        "COMP_CWORD": "1",
    }
    shown = subprocess.run(
        [sys.executable, "-m", "paceline.cli"],
        env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert shown.stdout.split() == ["plain,render"]
