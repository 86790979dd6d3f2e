# ruff: noqa: RUF001
"""Write the tables and marked figures of README.md and docs from the raw files of docs/results.

    python result_tables.py [--check]

A page has a pair of lines for each table, and this program fills the space between them:

    <!-- table: quickstart -->
    <!-- end -->

result_tables.toml says for each table which raw file it shows, where its rows are, and which
columns it has. A figure in a sentence is followed by its source, a raw file and a path in it, and
a factor if its unit is another one:

    1.85<!-- quickstart/rows/local_strategy=threads/speedup/median -->
    25.6<!-- hvprof/rows/0/step_s/median * 1000 -->
    54<!-- equivalence/rows/*/(whole)/(sum) -->

Every other figure in the prose of docs/results is a setting, a result of others or arithmetic:
given_figures.toml has it with its words, else --check fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import tomllib
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from common import median_interval

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "docs/results"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"([−\d.,]+)(<!-- (\w+)/([^>]+?)(?: \* ([\d.e+-]+))? -->)")
# What is no prose: tables of this program, code, the targets of links and comments.
NO_PROSE = re.compile(
    r"<!-- table: .*?<!-- end -->|```.*?```|`[^`]*`|(?<=\])\([^)]*\)|<!--.*?-->", re.DOTALL
)
ANY_FIGURE = re.compile(r"(?<![\w.-])\d[\d.,]*(?<![.,])")
WORD = re.compile(r"\([^)]*\)|[^/]+")  # of a path
UNITS = {
    "": 1.0,
    "ms": 1e3,
    "min": 1 / 60,
    "MB": 1e-6,
    "GB": 1e-9,
    "MiB": 2.0**-20,
    "million": 1e-6,
}
NONE = "–"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
Row = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is old")
    check = parser.parse_args().check
    old, unexplained = [], []
    for page in pages():
        unexplained += [f"{page.name}: {each}" for each in unexplained_figures(page)]
        if (new := renewed(page)) != page.read_text("utf-8"):
            old.append(page.name)
            if not check:
                page.write_text(new, "utf-8")
    if check and old:
        sys.exit(f"not as the raw files say: {', '.join(old)}; run python result_tables.py")
    if unexplained:
        lines = "".join(f"\n  - {each}" for each in unexplained)
        sys.exit(f"expected a raw file or an entry in given_figures.toml for:{lines}")


def pages() -> list[Path]:
    readmes = [HERE.parents[1] / "README.md", HERE.parent / "collectives/README.md"]
    return [*readmes, *sorted(RESULTS.parent.glob("**/*.md"))]


def renewed(page: Path) -> str:
    """Return the text of a page as the raw files give it."""
    folder = os.path.relpath(RESULTS / "raw", page.parent)
    return with_tables(page.read_text("utf-8"), folder)


def unexplained_figures(page: Path) -> list[str]:
    """Return the figures of a results page that are neither from raw files nor given."""
    if page.parent != RESULTS:
        return []
    phrases = given_figures()
    return figures_without(page.read_text("utf-8"), [*phrases["everywhere"], *phrases[page.name]])


def figures_without(text: str, given: Sequence[str]) -> list[str]:
    """Return the figures in prose that have no marker and are in no given phrase, with context."""
    prose = " ".join(NO_PROSE.sub(" ", FIGURE.sub(" ", text)).split())
    for phrase in sorted(given, key=len, reverse=True):
        prose = re.sub(rf"(?<![\w.,]){re.escape(phrase)}(?![\d])", "…", prose)
    return [
        prose[max(0, found.start() - 40) : found.end() + 20].strip()
        for found in ANY_FIGURE.finditer(prose)
    ]


@cache
def given_figures() -> dict[str, list[str]]:
    """Return the phrases with figures that no raw file has: by page, and those of all pages."""
    return tomllib.loads((HERE / "given_figures.toml").read_text("utf-8"))


@cache
def declared() -> dict[str, Any]:
    """Return what result_tables.toml says of each table."""
    tables = tomllib.loads((HERE / "result_tables.toml").read_text("utf-8"))
    return {name: {**tables.get(spec.get("like"), {}), **spec} for name, spec in tables.items()}


@cache
def raw(name: str) -> Any:
    """Return a raw file; what a comparison in it contains counts as the file's own."""
    document = json.loads((RESULTS / "raw" / f"{name}.json").read_text("utf-8"))
    return {**document.get("comparison", {}), **document}


def with_tables(text: str, folder: str = "raw") -> str:
    """Return a page with the tables and figures that the raw files give.

    Of several tables of one raw file, the first states where the figures come from. folder: with
    the raw files, as links of the page name it.
    """
    stated: set[str] = set()

    def filled(found: re.Match[str]) -> str:
        names = sources(declared()[found[2]])
        lines = [
            same_source(name, folder) if name in stated else provenance(name, folder)
            for name in names
        ]
        stated.update(names)
        source = lines[0] if len(lines) == 1 else "\n".join(f"- {line}" for line in lines)
        return f"{found[1]}\n{table(found[2])}\n{source}\n{found[3]}"

    return FIGURE.sub(lambda found: figure(*found.groups()) + found[2], TABLE.sub(filled, text))


def figure(shown: str, _marker: str, name: str, path: str, factor: str | None) -> str:
    """Return the value at a path with as many decimals as the shown one.

    Raises LookupError if there is none.
    """
    value = at(raw(name), path)
    if value is None:
        raise LookupError(f"expected a figure in raw/{name}.json at {path}, found none")
    decimals = len(shown.partition(".")[2])
    return f"{value * float(factor or 1):,.{decimals}f}".replace("-", "−")


def parts(spec: Row) -> list[dict[str, Any]]:
    """Return the parts of a table, one for each raw file, with the settings that they share."""
    return [{**spec, **part} for part in spec.get("parts", [{}])]


def sources(spec: Row) -> list[str]:
    """Return the raw files of a table, each once."""
    return list(dict.fromkeys(part["raw"] for part in parts(spec)))


def table(name: str) -> str:
    """Return a table in Markdown."""
    spec = declared()[name]
    head, body = (pivoted if "cells" in spec else listed)(spec)
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def listed(spec: Row) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table with a row for each entry, or for each group."""
    entries = selected(spec)
    columns = [[*column, "", ""][:4] for column in spec["columns"]]
    grouping = spec.get("group")
    if grouping is None:
        groups = [[entry] for entry in entries]
    else:
        groups = list(grouped(entries, grouping).values())
    body = [[cell(group, *column[1:]) for column in columns] for group in groups]
    return [column[0] for column in columns], body


def pivoted(spec: Row) -> tuple[list[str], list[list[str]]]:
    """Return a table with the values of some fields as rows and of another one as columns."""
    rows, column, path, unit = spec["cells"]
    entries = selected(spec)
    heads = list(grouped(entries, [column]))
    body = []
    for names, of_row in grouped(entries, as_list(rows)).items():
        by_column = grouped(of_row, [column])
        joined = [
            " / ".join(shown(at(entry, path), unit) for entry in by_column.get(head, [])) or NONE
            for head in heads
        ]
        body.append([*map(label, names), *joined])
    return [*as_list(spec["corner"]), *(label(head) for (head,) in heads)], body


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def label(value: str | float) -> str:
    """Return the value of a field that names rows or columns."""
    return value if isinstance(value, str) else f"{value:,g}" if value < 1 else f"{value:,}"


def grouped(entries: Sequence[Row], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Return entries by the values of some fields, in the order in which these first occur."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for entry in entries:
        groups.setdefault(tuple(at(entry, key) for key in keys), []).append(entry)
    return groups


def selected(spec: Row) -> list[Row]:
    """Return the entries of the raw files that a table shows, in its order."""
    return [entry for part in parts(spec) for entry in selected_of(part)]


def selected_of(spec: Row) -> list[Row]:
    """Return the entries of one raw file."""
    found: list[Row] = list(entries_at(raw(spec["raw"]), spec["rows"]))
    for path, wanted in spec.get("where", {}).items():
        found = [entry for entry in found if at(entry, path) in as_list(wanted)]
    if "paper" in spec:
        of, values = spec["paper"]["of"], spec["paper"]["values"]
        found = [{**entry, "paper": values.get(str(at(entry, of)))} for entry in found]
    for path in reversed(spec.get("sort", [])):
        key = path.lstrip("-")
        found.sort(key=lambda entry: missing_last(at(entry, key)), reverse=path.startswith("-"))
    if "first" in spec:
        found = [group[0] for group in grouped(found, spec["first"]).values()]
    fields, texts = spec.get("fields", {}), spec.get("texts", {})

    def with_fields(entry: Row) -> Row:
        measured = {name: shown(at(entry, path), unit) for name, (path, unit) in texts.items()}
        return {**entry, **fields, **measured}

    return [with_fields(entry) for entry in found]


def missing_last(value: Any) -> tuple[bool, Any]:
    return value is None, value


def entries_at(document: Any, path: str) -> Iterator[Row]:
    """Yield what a path with `*` finds; an entry has the fields of those around it, and its key.

    The path "." finds the document.
    """
    found: list[ChainMap[str, Any]] = [ChainMap({"value": document}, document)]
    for word in path.split("/") if path != "." else ():
        parents, found = found, []
        for parent in parents:
            inner = parent["value"] if word == "*" else parent[word]
            items = inner.items() if isinstance(inner, dict) else enumerate(inner)
            for key, value in items if word == "*" else [(parent.get("key"), inner)]:
                fields = value if isinstance(value, dict) else {}
                above = {"parent": parent.get("key"), "key": key}
                found.append(parent.new_child({**above, **fields, "value": value}))
    yield from found


def at(document: Any, path: str) -> Any:
    """Return the value at a path of keys, indices and `field=value`; None if there is none.

    `*` stands for all entries of a list, and leads to a list of values. A word in parentheses is a
    function of what has been found, or `(field=value)` for a value with a slash. The last one may
    be a function of all values that were found with `*`, such as `(sum)`.
    """
    words = WORD.findall(path)
    if "*" in words and words[-1] in SUMMARIES:
        return SUMMARIES[words[-1]](list(flat(at(document, "/".join(words[:-1])))))
    for place, word in enumerate(words):
        field, is_choice, wanted = word.strip("()").partition("=")
        if word == "*":
            entries = document.values() if isinstance(document, dict) else document
            return [at(entry, "/".join(words[place + 1 :])) for entry in entries]
        if is_choice:
            document = next((each for each in document if str(each[field]) == wanted), None)
        elif word in COMPUTED:
            document = COMPUTED[word](document)
        elif isinstance(document, list):
            document = document[int(word)]
        else:
            document = document.get(word)
        if document is None:
            return None
    return document


def flat(found: Any) -> Iterator[Any]:
    """Yield the values of lists within lists, without missing ones."""
    if isinstance(found, list):
        for each in found:
            yield from flat(each)
    elif found is not None:
        yield found


def configuration(row: Row) -> str:
    """Return the name of a configuration: strategy, layout and what differs from the defaults."""
    words = [row["local_strategy"], row.get("layout", ""), *row.get("labels", ())]
    return " ".join(word for word in [*words, row.get("options", {}).get("balance")] if word)


def mark(row: Row) -> str:
    """Return ✓ for an equivalent row, ✗ for one that is not, ~ for a lossy one.

    ✓¹ says that only first steps were compared.
    """
    first_steps = "¹" if row.get("equivalence_grade") == "start" else ""
    return {True: f"✓{first_steps}", False: "✗", None: "~"}[row["equivalent"]]


def is_whole(row: Row) -> bool:
    """Return whether a row is equivalent from the first to the last step."""
    return mark(row) == "✓"


def marked_speedup(row: Row) -> str:
    return f"{shown(row['speedup'])} {mark(row)}"


def stop_s(recovery: Row) -> float | None:
    """Return the time from the last step before a failure to the end of the next one."""
    parts = [recovery[f"{part}_s"] for part in ("detect", "restart", "restore", "next_step")]
    return None if None in parts else sum(parts)


def speedup_of_hosts(point: Row) -> float:
    """Return the measured speedup over one host of a point that was also predicted."""
    return float(point["one_host_s"] / point["measured_s"]["median"])


SUMMARIES: dict[str, Callable[[Any], Any]] = {
    "(median)": statistics.median, "(least)": min, "(most)": max, "(sum)": sum, "(count)": len,
}  # fmt: skip
COMPUTED: dict[str, Callable[[Any], Any]] = SUMMARIES | {
    "(name)": configuration, "(mark)": mark, "(whole)": is_whole,
    "(marked speedup)": marked_speedup, "(speedup of hosts)": speedup_of_hosts, "(stop)": stop_s,
}  # fmt: skip


def cell(entries: Sequence[Row], path: str, unit: str, summary: str) -> str:
    values = [at(entry, path) for entry in entries]
    if not summary:
        return shown(values[0], unit)
    present = [value for value in values if value is not None]
    if summary == "share":
        return f"{sum(map(bool, present))} of {len(present)}" if present else NONE
    if summary == "count":
        return str(len(values))
    if not present:
        return NONE
    if summary == "range":
        return " to ".join(dict.fromkeys(shown(f(present), unit) for f in (min, max)))
    return shown(max(present) if summary == "max" else statistics.median(present), unit)


def shown(value: Any, unit: str = "") -> str:
    """Return a value as text: an interval for values of repeats, three digits for a number."""
    if value is None:
        return NONE
    if isinstance(value, list) and value and isinstance(value[0], float):
        value = median_interval(value)
    if isinstance(value, list):
        return ", ".join(shown(each, unit) for each in value) or NONE
    if isinstance(value, dict):
        return interval(value, unit)
    if isinstance(value, bool):
        return "✓" if value else "✗"
    is_word = isinstance(value, str) and not value.isdecimal()
    return value if is_word else number(float(value), unit)


def interval(value: Row, unit: str) -> str:
    """Return an interval as text, or each entry of another dictionary."""
    if "low" not in value:
        return ", ".join(f"{key} {shown(each, unit)}" for key, each in value.items())
    middle = next(value[name] for name in ("mean", "median", "estimate") if name in value)
    low, middle, high = (number(each, unit) for each in (value["low"], middle, value["high"]))
    return middle if low == high else f"{middle} ({low}–{high})"


def number(value: float | None, unit: str) -> str:
    """Return a number with three significant digits, a percentage with two."""
    if value is None:  # a bound of an interval, if not all repeats reached a target
        return "∞"
    if unit == "percent":  # of a column that says so
        return f"{100 * value:.1f}"
    if unit == "%":
        value = 100 * value
        return f"{value:.{0 if abs(value) >= 9.95 or abs(value) < 0.05 else 1}f} %".replace(
            "-", "−"
        )
    value *= UNITS[unit]
    if abs(value) >= 100 or value == round(value):
        text = f"{value:,.0f}"
    elif abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        text = f"{mantissa}·10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    else:
        value = float(f"{value:.3g}")
        decimals = 2 - math.floor(math.log10(abs(value)))
        text = f"{value:,.{min(decimals, 3)}f}"
    return text.replace("-", "−")


def provenance(name: str, folder: str) -> str:
    """Return the sentence below a table: command, date, version, commit, machine and raw file."""
    document = raw(name)
    versions, host = document.get("versions", {}), document.get("host", {})
    commit = (document.get("git") or {}).get("commit") or document.get("commit")
    stated = document.get("machine", "machine not recorded")
    machine = f"{host['cpu_model']}, {host['cores']} cores" if host else stated
    parts = [
        f"`{document['command']}`" if "command" in document else "",
        document.get("date", ""),
        f"version {versions['paceline']}" if "paceline" in versions else "",
        f"commit {commit[:7]}" if isinstance(commit, str) else "",
        machine,
        f"[raw]({folder}/{name}.json)",
    ]
    return ", ".join(part for part in parts if part) + "."


def same_source(name: str, folder: str) -> str:
    """Return the sentence below a table whose raw file a table above it has named."""
    return f"As above, [raw]({folder}/{name}.json)."


if __name__ == "__main__":
    main()
