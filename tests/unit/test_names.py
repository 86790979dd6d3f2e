"""A public class has a name of its own, so that a search for it finds one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import paceline

PACKAGE = Path(paceline.__file__).parent


def test_no_two_public_classes_have_the_same_name():
    homes = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
