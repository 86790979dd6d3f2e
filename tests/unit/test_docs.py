"""The documentation agrees with the code: links, commands, exit codes, files, whole specs."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import signal
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from tests.support.documentation import FENCED, PAGES, ROOT
from tests.support.outputs import form

from paceline.analysis.compare.row import Row
from paceline.base.errors import ExitCode
from paceline.cli.app import app
from paceline.measure.records import layout
from paceline.plan.spec import models
from paceline.plan.spec.extensions import GROUPS, LAUNCHERS
from paceline.plan.spec.rules.trial import declared_keys
from paceline.plan.spec.values import CheckpointSettings, FailureSettings

_FROM_INDEX = re.compile(r"pip install (?:-\S+ )*['\"]?paceline(?:\[|(?![-\w./]))")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
MOST_WORDS = 30_000  # written by people; `python python/tools/words.py` has those of each page


def _prose(page: Path) -> str:
    return FENCED.sub("", page.read_text("utf-8"))


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
        found.add(re.sub(r"[^\w\- ]", "", plain.replace("`", "")).replace(" ", "-"))
    return found


def _dead_links(page: Path) -> list[str]:
    dead = []
    for target, anchor in _LINK.findall(_prose(page)):
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        is_dead = not path.exists() or (
            anchor and path.suffix == ".md" and anchor not in _anchors(path)
        )
        if is_dead:
            dead.append(f"{target}#{anchor}" if anchor else target)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    assert _dead_links(page) == []


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n[a](none.md) [b](#title) [c](#no-title) [d](page.md#title)\n")
    assert _dead_links(page) == ["none.md", "#no-title"]


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text("utf-8")
    pages = [p.relative_to(ROOT / "docs") for p in (ROOT / "docs").glob("*/**/*.md")]
    assert [str(p) for p in sorted(pages) if f"({p})" not in index] == []


def test_no_page_and_no_message_installs_paceline_from_an_index():
    """No index has Paceline, so anybody could register its name there."""
    places = [*PAGES, *(ROOT / "python/src").rglob("*.py")]
    found = {
        str(place.relative_to(ROOT)): commands
        for place in places
        if (commands := _FROM_INDEX.findall(place.read_text("utf-8")))
    }
    assert found == {}
    assert len(_FROM_INDEX.findall("pip install -q 'paceline[mpi]' and pip install paceline")) == 2


def test_the_documentation_stays_short(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "python/tools")
    counted = importlib.import_module("words").words_of_pages()
    assert {"README.md", "docs/reference/spec.md", "docs/results/papers.md"} <= set(counted)
    assert "CHANGELOG.md" not in counted
    assert sum(counted.values()) <= MOST_WORDS


def test_words_are_those_that_people_wrote(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "python/tools")
    page = """# One title

    Four [words with a link](docs/no.md), … and two<!-- not this --> more.

    | a | `b` |
    |---|---|
    | ✓ | … |

    ```
    no words here
    ```

    <!-- table: speeds -->
    | none | here |
    <!-- end -->
    """
    assert importlib.import_module("words").words(page) == 2 + 8 + 2


def _quickstart_words(row: dict[str, Any]) -> tuple[str, ...]:
    """Return what the table shows of a measured row, without the layout."""
    speedup, low, high = (row["speedup"][name] for name in ("estimate", "low", "high"))
    width = max(high - speedup, speedup - low) / speedup
    first = ("1", "(base)") if row["is_baseline"] else (f"{speedup:.2f}", f"±{width:.0%}")
    rate = f"{row['samples_per_s']['estimate']:.0f}"
    transport = row["transport"].replace("none", "\u2013")
    cost = row["main_cost"].replace("computation", "compute")
    names = (row["local_strategy"], row["launcher"], transport, cost)
    return (*first, rate, *names, f"{row['main_cost_share']:.0%}")


@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/first-comparison.md"])
def test_the_table_of_the_quickstart_is_the_measured_one(page):
    raw = json.loads((ROOT / "docs/results/raw/quickstart.json").read_text("utf-8"))
    lines = [line for line in (ROOT / page).read_text("utf-8").splitlines() if line.endswith(" ✓")]
    shown = [tuple(re.sub(r"[?=✓]|\d\u00d7\d|\bm\d", "", line).split()) for line in lines]
    assert len(shown) >= 5
    assert set(shown[:5]) <= {_quickstart_words(row) for row in raw["rows"]}


def test_the_form_of_an_output_has_no_figures_and_no_verdict():
    table = "speedup /s strategy\n?1.8 ±9% 67 processes compute 8% ✓\n\neq.: notes\n\ntiny: a\n\n"
    other = "speedup /s strategy\n 2.1 ±1% 9 processes waiting 30% ✓\n\neq.: others\n\n"
    assert form(table + "report: a.html") == form(other + "report: a.html")
    assert form(table) != form(table.replace("processes", "threads"))
    assert form("  lib/a.py:3 in f\nrank 1 waits") == form("rank 2 waits")
    assert form("latency  0.016 to 0.03 ms") == form("latency  0.014 ms")


def test_commands_are_documented():
    page = (ROOT / "docs/reference/cli.md").read_text("utf-8")
    assert {"run", "compare", "sidecar"} <= set(app.commands)
    assert [name for name in app.commands if f"`paceline {name}" not in page] == []


def test_the_help_of_the_commands_is_the_present_one():
    """In a process of its own: click keeps the help option that a command had first."""
    command = [sys.executable, ROOT / "python/tools/cli_page.py", "--check"]
    subprocess.run(command, check=True, timeout=60)


def test_exit_codes_are_documented():
    page = (ROOT / "docs/reference/cli.md").read_text("utf-8")
    signals = {128 + signal.SIGHUP}  # SIGINT and SIGTERM have names among the exit codes
    documented = [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert documented == sorted({*map(int, ExitCode), *signals})


def test_files_of_a_run_directory_are_documented():
    page = (ROOT / "docs/reference/run-directory.md").read_text("utf-8")
    source = Path(layout.__file__).read_text("utf-8")
    names = set(
        re.findall(r'"([\w.]+\.(?:jsonl?|txt|log|prom|toml|html|safetensors|parquet))"', source)
    )
    assert names
    assert sorted(name for name in names if f"{name}`" not in page) == []


def test_fields_of_a_compared_row_are_documented():
    page = (ROOT / "docs/reference/run-directory.md").read_text("utf-8")
    section = page.partition("### `paceline compare --json`")[2].partition("\n### ")[0]
    first_cells = re.findall(r"^\| (`[^|]*)\|", section, re.MULTILINE)
    documented = re.findall(r"`(\w+)`", "".join(first_cells))
    kinds = get_type_hints(Row)
    names = [
        [each.name for each in fields(kind)] if is_dataclass(kind) else [name]
        for name, kind in kinds.items()
    ]
    assert sorted(documented) == sorted(itertools.chain.from_iterable(names))


def _spec_keys() -> dict[str, set[str]]:
    """Return the keys of each table of a spec, with those of the installed extensions."""
    tables = {
        "training": models.TrainingRequest,
        "workloads": models.WorkloadRequest,
        "trials": models.TrialRequest,
        "tune": models.TuneSettings,
        "telemetry": models.TelemetrySettings,
        "limits": models.Limits,
        "checkpoint": CheckpointSettings,
        "failures": FailureSettings,
        "network": models.NetworkSettings,
        **{launcher.name: launcher.Settings for launcher in LAUNCHERS.all()},
    }
    keys = {name: set(model.model_fields) for name, model in tables.items()}
    keys["trials"] |= set(declared_keys())
    return keys


def test_every_key_of_the_spec_is_documented():
    page = (ROOT / "docs/reference/spec.md").read_text("utf-8")
    documented = set(re.findall(r"^(?:# )?(\w+) = ", page, re.MULTILINE))
    documented |= set(re.findall(r"`(\w+)`", page)) | set(re.findall(r"(\w+) = \d", page))
    missing = {table: sorted(keys - documented) for table, keys in _spec_keys().items()}
    assert {table: keys for table, keys in missing.items() if keys} == {}


def test_every_extension_is_documented():
    page = (ROOT / "docs/reference/spec.md").read_text("utf-8")
    names = [descriptor.name for group in GROUPS.values() for descriptor in group.all()]
    assert [name for name in names if name not in page] == []
