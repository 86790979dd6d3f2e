"""The verbs in groups, and the only place that turns errors into exit codes."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

import click

from paceline import __version__
from paceline.base.errors import ExitCode, PacelineError, PacelineWarning
from paceline.base.host.memory import permanent_objects
from paceline.base.host.messages import printable, say, show_warning
from paceline.base.host.programs import missing_extra
from paceline.cli.streams import EndedBySignal, make_streams_usable, reader_may_end, signals_raise

# Set to 1, it makes Python show the stack trace of an error of the operating system.
_TRACEBACK_VARIABLE = "PACELINE_TRACEBACK"
# What to do about an error of the operating system.
_ADVICE = {
    errno.ENOSPC: "free some space, or choose another disk",
    errno.EDQUOT: "free some space of your quota, or choose another disk",
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "end other programs, or use less memory",
}
# Set by the shell while it completes a word; click answers.
_COMPLETION_VARIABLE = "_PACELINE_COMPLETE"
# Each verb is the `command` of the module of its name. Its line in the help stands here, so that
# `paceline --help` loads none of these modules.
_SECTIONS = {
    "Measure": {
        "init": "Write a commented spec to edit.",
        "list": "List the shipped experiments, and everything that a spec can name.",
        "show": "Print the spec of a shipped experiment.",
        "plan": "Show what a run would do; run nothing.",
        "run": "Run an experiment or a training script, and compare.",
        "verify": "Show whether a training script is trained right by several ranks.",
    },
    "Read results": {
        "compare": "Print the table of a run, or compare two runs.",
        "explain": "Split a difference in step time into parts, and name the causes.",
        "report": "Write the report of a run, one HTML file.",
        "profile": "Show the communication time of a run by cause.",
        "predict": "Predict configurations that were not run.",
        "export": "Write a run for other tools.",
    },
    "Tune": {
        "tune": "Find the fastest settings, or the largest batch, by short trials.",
    },
    "Watch": {
        "watch": "Show a running run in this terminal, or record a training with its own launcher.",
        "monitor": "Show a run in Prometheus.",
        "stacks": "Show where the ranks of a running trial are.",
    },
    "Data": {
        "data": "Synthesise, ingest, register and inspect data sets.",
    },
    "This machine": {
        "doctor": "Show what this machine or several hosts lack.",
        "sidecar": "Sample the resources of this host and of processes.",
    },
    "Cluster files": {
        "render": "Write the trials of a spec as jobs of a scheduler.",
    },
}
_HIDDEN = ("lab",)  # for tests: a cluster of simulated hosts


class _Verbs(click.Group):
    """A group whose commands are loaded when they run."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a verb; click suggests similar names for None."""
        if cmd_name not in self.commands and cmd_name not in _HIDDEN:
            return super().get_command(ctx, cmd_name)
        with permanent_objects():
            module = import_module(f"paceline.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs in groups."""
        del ctx
        width = max(map(len, self.commands))
        for section, verbs in _SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), text) for name, text in verbs.items()])


def _epilog() -> str:
    codes = ", ".join(f"{code:d} {code.meaning}" for code in ExitCode)
    return f"Exit codes: {codes}.\n\nStart with: paceline run quickstart"


app = _Verbs(
    "paceline",
    commands={
        name: click.Command(name, short_help=text)
        for verbs in _SECTIONS.values()
        for name, text in verbs.items()
    },
    help="Find the fastest configuration for distributing a training on these machines: by how "
    "much, and why.",
    epilog=_epilog(),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
click.version_option(__version__, prog_name="paceline", message="%(prog)s %(version)s")(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's mistake shows no stack trace."""
    warnings.showwarning = show_warning
    warnings.simplefilter("default", PacelineWarning)  # no error, also with -W error
    make_streams_usable()
    if _COMPLETION_VARIABLE in os.environ:
        app.main(prog_name="paceline", complete_var=_COMPLETION_VARIABLE)  # exits
    with reader_may_end("stderr"):
        return _run_command(sys.argv[1:] if argv is None else list(argv))


def _run_command(words: list[str]) -> int:
    try:
        with signals_raise():
            code = _invoke(words)
        sys.stdout.flush()  # here a closed pipe is handled, at the exit of Python it is not
    except PacelineError as error:
        _say_error(str(error), error)
        return error.exit_code
    except ImportError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        _say_error(str(missing), error)
        return missing.exit_code
    except KeyboardInterrupt as error:
        _say_error("interrupted", error)
        return ExitCode.INTERRUPTED
    except EndedBySignal as error:
        _say_error(f"ended by {error.name}", error)
        raise
    except BrokenPipeError:
        # The reader of our output has ended (`paceline compare … | head`). The interpreter must
        # not flush to the closed pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as error:
        known = _known_cause(words, error)
        if known is None or os.environ.get(_TRACEBACK_VARIABLE) == "1":
            raise
        code, text = known
        _say_error(f"{text}. {_TRACEBACK_VARIABLE}=1 shows where it was.", error)
        return code
    return code


def _known_cause(words: Sequence[str], error: Exception) -> tuple[ExitCode, str] | None:
    """Return what to say about an error that no part of Paceline expects; None if it is ours."""
    if isinstance(error, OSError):
        return ExitCode.ENVIRONMENT, _os_error_message(error)
    if isinstance(error, MemoryError):
        return ExitCode.ENVIRONMENT, f"expected more memory than there is; {_ADVICE[errno.ENOMEM]}"
    damage = _damage_in_runs(words) if _reads_a_run(words) else None
    return None if damage is None else (ExitCode.DATA, damage)


def _reads_a_run(words: Sequence[str]) -> bool:
    """Return whether a command computes from the records of a run and starts nothing."""
    readers = {*_SECTIONS["Read results"], "watch"}
    starts = {"--", "--measure"} & set(words)
    return bool(words) and words[0] in readers and not starts


def _damage_in_runs(words: Sequence[str]) -> str | None:
    """Return what is wrong with the records of the runs that a command has read; None if nothing
    is, so that the error is one of Paceline.

    Each file is checked when it is read, but somebody else's run may combine values that none has.
    """
    from paceline.analysis.trial.contradictions import contradiction_in  # noqa: PLC0415  (heavy)
    from paceline.cli.options import run_dirs_of  # noqa: PLC0415
    from paceline.measure.records.layout import RunFiles  # noqa: PLC0415

    found = (contradiction_in(RunFiles(path)) for path in run_dirs_of(words))
    return next((each for each in found if each is not None), None)


def _invoke(words: list[str]) -> int:
    # click's own main() would turn a signal and a closed pipe into an exit code of 1
    try:
        with app.make_context("paceline", list(words), obj=words) as context:
            code: int = app.invoke(context) or ExitCode.OK
    except click.exceptions.Exit as ended:  # after --help
        return ended.exit_code
    except click.UsageError as error:
        error.show(sys.stderr)
        return ExitCode.USAGE
    return code


def _os_error_message(error: OSError) -> str:
    """Say which file the operating system refused, and why."""
    places = [str(name) for name in (error.filename, error.filename2) if name is not None]
    reason = error.strerror or str(error) or type(error).__name__
    advice = _ADVICE.get(error.errno or 0, "check the permissions, the free space and the limits")
    return f"{': '.join([*places, reason])}; {advice}"


def _say_error(text: str, error: BaseException) -> None:
    """Print a message, and the notes of the error: how to continue."""
    say(text)
    for note in getattr(error, "__notes__", ()):
        print(printable(note), file=sys.stderr)
