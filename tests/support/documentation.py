"""The pages of the documentation, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PLACES = (
    "*.md",
    "docs/**/*.md",
    "examples/**/*.md",
    "*/README.md",
    "python/collectives/README.md",
    "python/src/paceline/README.md",
)
PAGES = sorted({page for place in _PLACES for page in ROOT.glob(place)})
# Pages about earlier versions, with forms that were removed since.
EARLIER = {ROOT / "CHANGELOG.md"}
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SHELLS = ("", "console", "sh", "bash")
_SPAN = re.compile(r"`([^`]+)`")
_OPTIONAL = re.compile(r"\[(?:OPTIONS|([-A-Z.][^\[\]{]*))\]")  # as in `compare [--json]`
_ENDS = ("|", "||", "&&", ";", "&", ">", ">>")
_BEFORE = ("sudo", "--", *_ENDS)  # after these a command begins
_IN_CONTAINER = ("docker run", "buildah run")


def commands_in_blocks(page: Path) -> Iterator[list[str]]:
    """Yield the words of every `paceline` and `pacelinew` command in the code blocks of a page."""
    for line in lines_in_blocks(page):
        if "paceline" in line:
            yield from _commands(line)


def lines_in_blocks(page: Path) -> Iterator[str]:
    """Yield the lines of the code blocks of a page that may be commands, without `[` and `]`."""
    for language, block in _BLOCK.findall(page.read_text("utf-8")):
        if language in _SHELLS:
            for line in block.replace("\\\n", " ").splitlines():
                yield _with_options(line.removeprefix("$ "))


def commands_in_prose(page: Path) -> Iterator[list[str]]:
    """Yield the words of the commands that stand between backticks; they may be shortened."""
    for text in _SPAN.findall(FENCED.sub("", page.read_text("utf-8"))):
        if text.startswith(("paceline ", "./pacelinew ")) and "…" not in text:
            yield from _commands(_with_options(text))


def _with_options(line: str) -> str:
    """Return a line with all that it marks as optional."""
    while _OPTIONAL.search(line):  # options within options
        line = _OPTIONAL.sub(r"\1", line)
    return line


def _commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    for place, word in enumerate(words):
        if " " in word and "paceline" in word.split()[0]:  # the value of --exec
            yield from _commands(word)
        elif _is_paceline(word) and _begins_command(line, words, place):
            rest = words[place + 1 :]
            end = next((at for at, each in enumerate(rest) if each in _ENDS), len(rest))
            yield [Path(word).name, *rest[:end]]


def _is_paceline(word: str) -> bool:
    return word.rpartition("/")[2] in ("paceline", "pacelinew")


def _begins_command(line: str, words: list[str], place: int) -> bool:
    before = words[place - 1] if place else "&&"
    is_in_container = line.startswith(_IN_CONTAINER) and words[place] == "paceline"
    is_on_host = "lab exec" in line and before.isdecimal()
    return before in _BEFORE or bool(re.match(r"\w+=", before)) or is_in_container or is_on_host
