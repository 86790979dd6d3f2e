"""Groups of tests that one pytest-xdist worker runs, one after the other.

pytest-xdist 3.8 reads group names from the ids of the tests, where pytest 9.2 does not let it write
them. So `--dist loadgroup` uses this scheduler, whose groups follow from the files.
"""

from __future__ import annotations

import functools
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]
# A new lab removes what a killed one left, so tests with labs exclude each other.
EXCLUSIVE = {'needs("lab")': "lab"}


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Keep the tests of a file together, and all files that use an exclusive capability."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


@functools.cache
def group_of(file: str) -> str:
    """Return the name of the group of a test file, given by its path below the project folder."""
    path = ROOT / file  # another --rootdir may give other names
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = [group for mark, group in EXCLUSIVE.items() if f"pytest.mark.{mark}" in text]
    return found[0] if found else file
