"""The outputs that pages show below commands, compared with what the commands print.

With PACELINE_WRITE_OUTPUTS=1 the outputs on the pages are written anew. Tests of outputs have
`page_shows` in their names.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from tests.support.documentation import ROOT

from paceline.collectives.host import host_name

WRITES = "PACELINE_WRITE_OUTPUTS" in os.environ
# A block of commands, and the output that a page shows below it, whole or up to a line.
_SHOWN = re.compile(
    r"^```\w*\n(?P<commands>[^`]+?)^```\n\n"
    r"<!-- output(?: up to: (?P<last>[^\n]+))? -->\n```text\n(?P<output>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
# What depends on the figures of a run.
_BY_CHANCE = re.compile(
    r"^eq\.: .*?(?=^report: |\Z)"  # the notes below a table, and the verdict
    r"|^ +best  .*?(?=^\S|\n\n)"  # of `tune`: what is better than the default, and its remarks
    r"|^(?:\* fastest|\? undecided|no gain: |\S+: the default is).*?(?=^\S|\n\n)"
    r"|(?<=\w) [*?](?= )",
    re.DOTALL | re.MULTILINE,
)
_COST = re.compile(r"\b(?:compute|data wait|bubble|waiting|transfer|other) (?=\d)")
_FIGURE = re.compile(r"[=?+(-]?\d\S*|±\S+|missed|\u2013")
_RANGE = re.compile(r"(?<=\d) to (?=\d)")  # of figures; a single one is shown where both are equal
_CALL = re.compile(r"  \S+:\d+ in ")  # of a stack


def shown_outputs(page: Path) -> list[str]:
    """Return the commands above the outputs that a page shows."""
    return [part["commands"].strip() for part in _SHOWN.finditer(page.read_text("utf-8"))]


def compare_outputs(page: Path, found: Mapping[str, str], *, exact: bool = False) -> None:
    """Compare outputs with those on the page, by the commands above them; or write them.

    exact: every run prints the same figures.
    """
    text = page.read_text("utf-8")
    parts = {part["commands"].strip(): part for part in _SHOWN.finditer(text)}
    for commands, whole in found.items():
        part = parts[commands]
        output = _up_to(whole, part["last"])
        if WRITES:
            old, new = (f"```text\n{each}```" for each in (part["output"], output))
            page.write_text(text := text.replace(part[0], part[0].replace(old, new)), "utf-8")
        elif exact:
            assert output == part["output"], commands
        else:
            assert form(output) == form(part["output"]), commands


def _up_to(output: str, last: str | None) -> str:
    """Return the output up to the first line that begins with these words."""
    if last is None:
        return output
    lines = output.splitlines(keepends=True)
    end = next(number for number, line in enumerate(lines) if line.startswith(last))
    return "".join([*lines[: end + 1], "…\n"])


def without_places(output: str, folder: Path) -> str:
    """Return the output with other names for this machine and its folders, without its load."""
    libraries = sysconfig.get_path("purelib")
    places = {f"{folder}/": "", libraries: "site-packages", f"{ROOT}/python/src": "site-packages"}
    for place, name in places.items():
        output = output.replace(place, name)
    output = re.sub(rf"\b{re.escape(host_name())}\b", "node1", output)
    lines = (line.rstrip() for line in output.splitlines() if not line.startswith("load: "))
    return "".join(f"{line}\n" for line in lines)


def form(output: str) -> list[str]:
    """Return what every run prints: the words without figures, notes and verdict.

    They are sorted, because the order of configurations and the breaks of lines differ. Tests may
    run one repeat where the page has several.
    """
    lines = _BY_CHANCE.sub("", output).replace("repeats", "repeat").splitlines()
    known = (_COST.sub("", _RANGE.sub(" ", line)) for line in lines if not _CALL.match(line))
    return sorted(word for line in known for word in _FIGURE.sub("", line).split())
