# ruff: noqa: RUF001
"""Tables and marked figures of the documentation are what the raw files say."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"
COMPUTED = ("median", "least", "most")


@pytest.fixture
def result_tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "python/benchmarks")
    return importlib.import_module("result_tables")


READMES = [ROOT / "README.md", ROOT / "python/collectives/README.md"]
PAGES = [*READMES, *sorted(ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_and_figures_follow_from_the_raw_files(
    result_tables: ModuleType, page: Path
) -> None:
    """If this fails, run `python result_tables.py` in python/benchmarks."""
    text = page.read_text("utf-8")
    assert result_tables.with_tables(text) == text


def test_every_declared_table_is_on_a_page(result_tables: ModuleType) -> None:
    texts = [page.read_text("utf-8") for page in RESULTS.glob("*.md")]
    on_pages = [name for text in texts for name in re.findall(r"<!-- table: (\w+) -->", text)]
    assert sorted(on_pages) == sorted(result_tables.declared())


def test_every_raw_file_is_used(result_tables: ModuleType) -> None:
    places = ("docs/**/*.md", "*.md", "python/benchmarks/*.toml", "tests/**/*.py")
    text = "\n".join(path.read_text("utf-8") for place in places for path in ROOT.glob(place))
    tables = {spec["raw"] for spec in result_tables.declared().values()}
    figures = set(re.findall(r"<!-- (\w+)/", text))
    named = set(re.findall(r"(\w+)\.json", text))
    assert {path.stem for path in (RESULTS / "raw").iterdir()} - tables - figures - named == set()


def test_a_changed_figure_is_written_anew(
    result_tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {
        "rows": [{"name": "a", "s": 0.5}, {"name": "b", "s": -1234.56}, {"name": "a/c", "s": 2}],
        "all": [3, 1, 8],
    }
    monkeypatch.setattr(result_tables, "raw", {"new": document}.__getitem__)
    marks = [
        "new/rows/name=b/s",
        "new/rows/(name=a/c)/s",
        "new/rows/0/s * 1000",
        *(f"new/all/({w})" for w in COMPUTED),
    ]
    old, new = ["0.70", "7", "1", "0", "0", "0"], ["−1,234.56", "2", "500", "3", "1", "8"]
    before, after = (
        " ".join(f"{figure}<!-- {mark} -->" for figure, mark in zip(figures, marks, strict=True))
        for figures in (old, new)
    )
    assert result_tables.with_tables(before) == after


def test_a_figure_that_no_raw_file_has_is_named(
    result_tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_tables, "raw", {"new": {"rows": []}}.__getitem__)
    with pytest.raises(LookupError, match=r"raw/new\.json at rows/name=c/s"):
        result_tables.with_tables("It took 0.70<!-- new/rows/name=c/s --> s.")


TABLE = """
raw = "new"
rows = "runs/*/rows/*"
where = { kind = ["x", "y"] }
sort = ["-link"]
group = ["link"]
columns = [
    ["link", "link"], ["rows", "s", "", "count"], ["median, ms", "s", "ms", "median"],
    ["share", "error", "%", "range"], ["right", "right", "", "share"],
]
"""
GROUPS = {
    "date": "2026-01-02",
    "command": "python new.py",
    "runs": [
        {
            "link": "a",
            "rows": [
                {"kind": "x", "s": 0.25, "error": -0.051, "right": True},
                {"kind": "y", "s": 0.75, "error": 0.2, "right": False},
                {"kind": "z", "s": 9.0, "error": 9.0, "right": True},
            ],
        },
        {"link": "b", "rows": [{"kind": "x", "s": 0.0123456, "error": 0.5, "right": True}]},
    ],
}


def test_rows_are_selected_sorted_grouped_and_summarised(
    result_tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_tables, "raw", {"new": GROUPS}.__getitem__)
    monkeypatch.setattr(result_tables, "declared", lambda: {"t": tomllib.loads(TABLE)})
    marks = "<!-- table: t -->\n<!-- end -->\n"
    first, second = result_tables.with_tables(marks * 2).split("<!-- end -->\n")[:2]
    for text in (first, second):
        assert text.splitlines()[4:6] == [
            "| b | 1 | 12.3 | 50 % to 50 % | 1 of 1 |",
            "| a | 2 | 500 | −5.1 % to 20 % | 1 of 2 |",
        ]
    source = "`python new.py`, 2026-01-02, machine not recorded, [raw](raw/new.json)."
    assert first.endswith(f"\n\n{source}\n")
    assert second.endswith("\n\nAs above, [raw](raw/new.json).\n")


def test_values_of_a_paper_are_beside_those_of_its_rows(
    result_tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = """
    raw = "new"
    rows = "rows/*"
    paper = { of = "name", values = { "a" = "26.62", "c" = "above 90 %" } }
    columns = [["name", "name"], ["paper", "paper"], ["here", "s"]]
    """
    rows = [{"name": name, "s": 0.5} for name in ("a", "b", "c")]
    monkeypatch.setattr(result_tables, "raw", {"new": {"rows": rows}}.__getitem__)
    monkeypatch.setattr(result_tables, "declared", lambda: {"t": tomllib.loads(spec)})
    assert result_tables.table("t").splitlines()[2:] == [
        "| a | 26.62 | 0.500 |", "| b | – | 0.500 |", "| c | above 90 % | 0.500 |",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"equivalent": True, "equivalence_grade": "whole"}, ("✓", True)),
        ({"equivalent": True, "equivalence_grade": "start"}, ("✓¹", False)),
        ({"equivalent": True}, ("✓", True)),  # of versions without grades
        ({"equivalent": False, "equivalence_grade": None}, ("✗", False)),
        ({"equivalent": None, "equivalence_grade": None}, ("~", False)),
    ],
)
def test_a_mark_says_whether_only_first_steps_were_compared(
    result_tables: ModuleType, row: dict[str, object], expected: tuple[str, bool]
) -> None:
    assert (result_tables.at(row, "(mark)"), result_tables.at(row, "(whole)")) == expected


@pytest.mark.parametrize(
    ("host", "named"),
    [
        ({"cpu_model": "AMD EPYC", "cores": 2}, ""),
        ({"cpu_model": "AMD EPYC", "cores": 64}, "AMD EPYC, 64 cores, "),
    ],
)
def test_a_table_of_another_machine_names_it(
    result_tables: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    host: dict[str, object],
    named: str,
) -> None:
    monkeypatch.setattr(result_tables, "raw", {"new": {"date": "today", "host": host}}.__getitem__)
    assert result_tables.provenance("new") == f"today, {named}[raw](raw/new.json)."


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (1234.5, "", "1,234"),
        (0.98765, "", "0.988"),
        (3.0e-6, "", "3.0·10⁻⁶"),
        ({"low": 1.0, "median": 1.5, "high": None}, "", "1.50 (1–∞)"),
        ({"low": 1.5, "median": 1.5, "high": 1.5}, "", "1.50"),
        (None, "ms", "–"),
        (True, "", "✓"),
        (2**21, "MiB", "2"),
        ("25000000", "MB", "25"),
    ],
)
def test_values_have_three_digits_and_their_interval(
    result_tables: ModuleType, value: object, unit: str, expected: str
) -> None:
    assert result_tables.shown(value, unit) == expected
