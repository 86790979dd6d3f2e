"""Texts follow the language rules of CONTRIBUTING.md, as far as a program can check them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/src/paceline"
# A docstring starts with an imperative verb or a noun phrase.
_OPENING = re.compile(r"(Of|As|What|Whether|Who|Whoever|Where|How|Those|That)\b")
# Words that readers cannot look up; version 0.2 replaced them by standard terms.
_BANNED = re.compile(
    r"\b(mend(s|ed|ing)?|nought|strangers?|whoever|counterparts|straggler loss|core budget|"
    r"less to send|hand(s|ed)? in|outlived|costly|photos|ledger)\b",
    re.IGNORECASE,
)
_PACKAGES = sorted({p.relative_to(PACKAGE).parts[0] for p in PACKAGE.rglob("*.py")})


def _openings(source: str) -> list[str]:
    """Return the first lines of docstrings with a forbidden first word."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    texts = (ast.get_docstring(node) or "" for node in nodes)
    return [text.splitlines()[0] for text in texts if _OPENING.match(text)]


def _banned(text: str) -> list[str]:
    return [match[0] for match in _BANNED.finditer(text)]


@pytest.mark.parametrize("package", _PACKAGES)
def test_texts_of_a_package(package):
    path = PACKAGE / package
    sources = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    found = {
        str(source.relative_to(PACKAGE)): offences
        for source in sources
        if (text := source.read_text("utf-8")) and (offences := [*_openings(text), *_banned(text)])
    }
    assert found == {}


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/**/*.md")), ids=lambda page: page.name)
def test_texts_of_a_page(page):
    # Quoted output keeps its words, and so does the first column of a table.
    prose = re.sub(
        r"^```.*?^```|^\|.*?\|", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    assert _banned(prose) == []


def test_the_check_finds_openings_and_words():
    source = '"""Of a rank."""\ndef f():\n    """Whether it ends."""\n'
    assert _openings(source) == ["Of a rank.", "Whether it ends."]
    assert _openings('"""Offer a port."""\ndef f():\n    """Return it."""\n') == []
    assert _banned("Mend the ledger; a photograph stays.") == ["Mend", "ledger"]
