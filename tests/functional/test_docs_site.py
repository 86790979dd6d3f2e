"""The documentation as a site: complete, searchable, and without anything from another host."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tests.support.commands import run_command

pytestmark = [pytest.mark.functional, pytest.mark.timeout(200)]

ROOT = Path(__file__).parents[2]
# what a browser fetches by itself, unlike the target of a link
_FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?([^"' >]+)|<link[^>]*\shref=["']?([^"' >]+)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    mkdocs = Path(sys.executable).with_name("mkdocs")
    words = [mkdocs, "build", "--strict", "-f", ROOT / "mkdocs.yml", "-d", folder]
    built = run_command(words, 150)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_in_the_navigation(site):
    home = (site / "index.html").read_text("utf-8")
    pages = [p.relative_to(ROOT).with_suffix(".html") for p in (ROOT / "docs").rglob("*.md")]
    named = {str(page).replace("README.html", "index.html") for page in pages}
    assert sorted(page for page in named if f'href="{page}"' not in home) == []


def test_the_search_finds_prose_and_docstrings(site):
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))
    places = {entry["location"]: entry["text"] for entry in index["docs"]}
    assert "run directory" in places["docs/reference/api.html#paceline.load"]
    assert any(place.startswith("docs/how-to/") for place in places)


def test_nothing_comes_from_another_host(site):
    foreign = {
        f"{page.relative_to(site)}: {address}"
        for page in site.rglob("*.html")
        for found in _FETCHED.findall(page.read_text("utf-8"))
        if (address := "".join(found)).startswith(("http:", "https:", "//"))
    }
    assert foreign == set()
    styles = "".join(style.read_text("utf-8") for style in site.rglob("*.css"))
    assert re.findall(r"url\([\"']?(?:https?:)?//[^)]*\)", styles) == []
