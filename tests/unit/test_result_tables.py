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
COMPUTED = ("median", "least", "most", "sum", "count")


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
    assert result_tables.renewed(page) == page.read_text("utf-8")


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda page: page.name)
def test_figures_in_prose_of_results_are_from_raw_files_or_given(
    result_tables: ModuleType, page: Path
) -> None:
    assert result_tables.unexplained_figures(page) == []
    text = " ".join(page.read_text("utf-8").split())
    given = result_tables.given_figures()
    assert [phrase for phrase in given[page.name] if phrase not in text] == []


def test_a_figure_without_its_source_is_named(result_tables: ModuleType) -> None:
    text = (
        "VGG16 at 1 Gbit/s: 1.85<!-- a/b --> times `--repeats 3`, [raw](raw/9.json)\n"
        "<!-- table: t -->\n| 7 |\n<!-- end -->\n```\n8\n```\nand 2.5 s at 11 Gbit/s of\n5 %."
    )
    first, second = result_tables.figures_without(text, ["1 Gbit/s", "of 5 %"])
    assert "and 2.5 s" in first
    assert "11 Gbit/s" in second


def test_every_declared_table_is_on_a_page(result_tables: ModuleType) -> None:
    texts = [page.read_text("utf-8") for page in PAGES]
    on_pages = [name for text in texts for name in re.findall(r"<!-- table: (\w+) -->", text)]
    assert sorted(on_pages) == sorted(result_tables.declared())


def test_every_raw_file_is_used(result_tables: ModuleType) -> None:
    places = ("docs/**/*.md", "*.md", "python/collectives/*.md", "tests/**/*.py")
    text = "\n".join(path.read_text("utf-8") for place in places for path in ROOT.glob(place))
    specs = result_tables.declared().values()
    tables = {name for spec in specs for name in result_tables.sources(spec)}
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
        "new/rows/*/s/(most)",
        *(f"new/all/({w})" for w in COMPUTED),
    ]
    old = ["0.70", "7", "1", "0.0", *"00000"]
    new = ["−1,234.56", "2", "500", "2.0", *("3", "1", "8", "12", "3")]
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
            "| b | 1 | 12.3 | 50 % | 1 of 1 |",
            "| a | 2 | 500 | −5.1 % to 20 % | 1 of 2 |",
        ]
    source = "`python new.py`, 2026-01-02, machine not recorded, [raw](raw/new.json)."
    assert first.endswith(f"\n\n{source}\n")
    assert second.endswith("\n\nAs above, [raw](raw/new.json).\n")


PARTS = """
rows = "rows/*"
sort = ["s"]
columns = [["what", "what"], ["measured", "figure"]]
texts = { figure = ["s", "ms"] }
parts = [
    { raw = "old", first = ["name"], fields = { what = "each" } },
    { raw = "new", rows = ".", fields = { what = "all" }, texts = { figure = ["all", ""] } },
    { raw = "old", where = { name = "b" }, fields = { what = "b" } },
]
"""


def test_parts_of_a_table_are_from_several_raw_files(
    result_tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"name": "a", "s": None}, {"name": "b", "s": 0.5}, {"name": "a", "s": 0.25}]
    documents = {"old": {"rows": rows}, "new": {"all": 1}}
    monkeypatch.setattr(result_tables, "raw", documents.__getitem__)
    monkeypatch.setattr(result_tables, "declared", lambda: {"t": tomllib.loads(PARTS)})
    page = result_tables.with_tables("<!-- table: t -->\n<!-- end -->\n")
    assert page.splitlines()[4:] == [
        "| each | 250 |", "| each | 500 |", "| all | 1 |", "| b | 500 |", "",
        "- machine not recorded, [raw](raw/old.json).",
        "- machine not recorded, [raw](raw/new.json).",
        "<!-- end -->",
    ]  # fmt: skip


def lines_of(
    spec: str, rows: object, result_tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Return the lines of a table that shows the rows of a raw file `new`."""
    monkeypatch.setattr(result_tables, "raw", {"new": {"rows": rows}}.__getitem__)
    monkeypatch.setattr(result_tables, "declared", lambda: {"t": tomllib.loads(spec)})
    lines: list[str] = result_tables.table("t").splitlines()
    return lines


def test_a_table_of_cells_has_several_columns_that_name_a_row(
    result_tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = """
    raw = "new"
    rows = "rows/*"
    corner = ["net", "batch"]
    cells = [["net", "batch"], "link", "s", ""]
    """
    rows = [
        {"net": "a", "batch": 8, "link": "full", "s": 0.5},
        {"net": "a", "batch": 16, "link": "slow", "s": 0.25},
    ]
    assert lines_of(spec, rows, result_tables, monkeypatch) == [
        "| net | batch | full | slow |", "| --- | --- | --- | --- |",
        "| a | 8 | 0.500 | – |", "| a | 16 | – | 0.250 |",
    ]  # fmt: skip


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
    assert lines_of(spec, rows, result_tables, monkeypatch)[2:] == [
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
    ("next_step_s", "expected"), [(0.5, 4.0), (None, None)]
)  # None: the next failure came too early
def test_a_failure_stops_a_training_for_the_sum_of_its_parts(
    result_tables: ModuleType, next_step_s: float | None, expected: float | None
) -> None:
    recovery = {"detect_s": 1.0, "restart_s": 2.0, "restore_s": 0.5, "next_step_s": next_step_s}
    assert result_tables.at(recovery, "(stop)") == expected


def test_derived_values_of_rows(result_tables: ModuleType) -> None:
    point = {"one_host_s": 1.0, "measured_s": {"median": 4.0}}
    assert result_tables.at(point, "(speedup of hosts)") == 0.25
    row = {"speedup": {"low": 1.0, "median": 1.5, "high": 2.0}, "equivalent": False}
    assert result_tables.at(row, "(marked speedup)") == "1.50 (1–2) ✗"


def test_a_table_names_its_machine(
    result_tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = {"cpu_model": "AMD EPYC", "cores": 2}
    monkeypatch.setattr(result_tables, "raw", {"new": {"date": "today", "host": host}}.__getitem__)
    assert (
        result_tables.provenance("new", "raw") == "today, AMD EPYC, 2 cores, [raw](raw/new.json)."
    )


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
