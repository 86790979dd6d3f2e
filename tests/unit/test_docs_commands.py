"""The command line accepts every command in the documentation."""

from __future__ import annotations

import contextlib
import re
import shlex

import click
import pytest
from tests.support.documentation import (
    EARLIER,
    PAGES,
    ROOT,
    commands_in_blocks,
    commands_in_prose,
    lines_in_blocks,
)

from paceline.cli.app import app
from paceline.runner.job.job import parse_arguments

# of placeholders that stand for a number, or for one of several words
VALUES = {"FORMAT": "csv", "NAME": "tiny", "PERCENT": "3%", "SECONDS": "1", "N": "1", "S": "1"}
_VERB_OF_SCRIPT = re.compile(r"^    (\w+)\)$", re.MULTILINE)
SCRIPT_VERBS = set(_VERB_OF_SCRIPT.findall((ROOT / "pacelinew").read_text("utf-8")))

_JOB_SCRIPT = re.compile(
    r"(?:(?:mpi|spark)-jobs/train\.py|-m paceline\.runner\.launchers\.(?:local|torchrun))"
    r" (?P<words>.*)"
)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """Work in a folder where a run with a finished trial exists."""
    monkeypatch.chdir(tmp_path)
    trial = tmp_path / "runs/newest/trials/first"
    trial.mkdir(parents=True)
    (tmp_path / "runs/newest/manifest.json").write_text('{"spec_toml": ""}')
    (trial / "trial.json").write_text('{"training": {}}')
    (trial / "outcome.json").write_text('{"status": "ok"}')
    (tmp_path / "reference.json").touch()


def _refusal(words: list[str]) -> str | None:
    """Return why the command line refuses a command, None if it accepts it."""
    program, *rest = words
    if program == "pacelinew" and rest[:1] and rest[0] in SCRIPT_VERBS:
        return None
    command: click.Command = app
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest[0])
        if found is None:
            return f"no command {rest[0]}"
        command, rest = found, rest[1:]
    try:
        with contextlib.suppress(click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):  # help
            command.make_context(program, [_value(word) for word in rest])
    except click.UsageError as error:
        return type(error).__name__ + ": " + error.format_message()
    return None


def _value(word: str) -> str:
    """Return a word with its placeholder replaced; a name of a folder becomes that of a run."""
    if word in VALUES:
        return VALUES[word]
    word = word.partition("|")[0]  # of `fail|skip`
    is_folder = re.fullmatch(r"RUN_\w+|DIR|runs/[\w-]+|runs|[AB]", word)
    return "runs/newest" if is_folder else word


@pytest.mark.parametrize(
    "page", sorted({*PAGES} - EARLIER), ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_command_line_accepts_the_commands_of_a_page(page):
    in_blocks = [(words, _refusal(words)) for words in commands_in_blocks(page)]
    in_prose = [(words, _refusal(words)) for words in commands_in_prose(page)]
    refused = [
        f"{' '.join(words)}: {refusal}"
        for words, refusal in (*in_blocks, *in_prose)
        # a sentence need not name all that a command needs
        if refusal and not ((words, refusal) in in_prose and refusal.startswith("MissingParameter"))
    ]
    assert refused == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_job_scripts_accept_their_arguments_on_a_page(page):
    for line in lines_in_blocks(page):
        for found in _JOB_SCRIPT.finditer(line):
            words = shlex.split(found["words"], comments=True)
            parse_arguments("train.py", [_value(word) for word in words if word != "…"])
