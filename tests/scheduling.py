"""Groups of tests that one pytest-xdist worker runs, one after the other.

pytest-xdist 3.8 reads group names from the ids of the tests, where pytest 9.2 does not let it write
them. So `--dist loadgroup` uses this scheduler, whose groups follow from the files.
"""

from __future__ import annotations

import functools
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]
# Fixtures that take long to set up, so that one worker runs all files that use them.
SHARED_FIXTURES = ("spark_lab",)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Keep the tests of a file together, and all files that share an expensive fixture."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])


@functools.cache
def group_of(file: str) -> str:
    """Return the name of the group of a test file, given by its path below the project folder."""
    path = ROOT / file  # another --rootdir may give other names
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return next((fixture for fixture in SHARED_FIXTURES if f"{fixture}:" in text), file)
