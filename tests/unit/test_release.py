"""Every file that names the version of the release names the same one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from paceline import __version__

ROOT = Path(__file__).parents[2]


def test_the_package_the_citation_and_the_changelog_name_one_version():
    project = tomllib.loads((ROOT / "python/pyproject.toml").read_text("utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    newest = re.search(
        r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert newest is not None
    assert {__version__} == {project["version"], citation["version"], newest[1]}
    assert newest[2] == str(citation["date-released"])
