"""Groups of tests that one pytest-xdist worker runs, one after the other, and their order.

pytest-xdist 3.8 reads group names from the ids of the tests, where pytest 9.2 does not let it write
them. So `--dist loadgroup` uses this scheduler, whose groups follow from the files.
"""

from __future__ import annotations

import _thread
import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).resolve().parents[2]
# Fixtures that take long to set up, so that one worker runs all files that use them.
SHARED_FIXTURES = ("spark_lab", "recorded_api")
# No test takes so long. A worker that hangs ends earlier (tests/conftest.py); one that has died is
# not noticed while a process that it forked holds its pipe.
_SILENT_S = 1200.0


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Keep the tests of a file together, and all files that share an expensive fixture."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._silence = threading.Timer(_SILENT_S, self._interrupt)

    def mark_test_complete(self, *arguments: Any, **named: Any) -> None:
        """Note that a test has ended, and wait for the next one."""
        super().mark_test_complete(*arguments, **named)
        self._silence.cancel()
        if self.has_pending:
            self._silence = threading.Timer(_SILENT_S, self._interrupt)
            self._silence.daemon = True
            self._silence.start()

    def _interrupt(self) -> None:
        """End the session, and write which test each worker has begun."""
        for node, units in self.assigned_work.items():
            for _, test in _left(units):
                print(f"{node.gateway.id}: no end of {test}", file=sys.__stderr__, flush=True)
                break
        _thread.interrupt_main()

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that ended a worker; it does not run again in other workers."""
        for unit, test in _left(self.assigned_work[node]):
            unit[test] = True
            super().remove_node(node)
            return test
        return super().remove_node(node)


def _left(units: dict[str, dict[str, bool]]) -> Iterator[tuple[dict[str, bool], str]]:
    """Yield the tests of a worker that have not ended, the one that it has begun first."""
    for unit in units.values():
        for test, is_over in unit.items():
            if not is_over:
                yield unit, test


@functools.cache
def group_of(file: str) -> str:
    """Return the name of the group of a test file, given by its path below the project folder."""
    path = ROOT / file  # another --rootdir may give other names
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return next((fixture for fixture in SHARED_FIXTURES if f"{fixture}:" in text), file)


def places(files: Iterable[str]) -> dict[str, tuple[int, float]]:
    """Return sort keys that order test files, given by their paths below the project folder.

    The largest groups come first: those that share a fixture. Unit tests come last, because their
    short files fill the gaps at the end. The files of the other folders alternate: tests of the
    cluster mostly wait, contract tests mostly compute, so their mixture keeps the cores busy.
    """
    folders: dict[str, list[str]] = {}
    for file in dict.fromkeys(files):
        folders.setdefault(file.split("/")[1], []).append(file)
    return {
        file: (_rank(file, folder), number / len(members))
        for folder, members in folders.items()
        for number, file in enumerate(members)
    }


def _rank(file: str, folder: str) -> int:
    return 0 if group_of(file) in SHARED_FIXTURES else 2 if folder == "unit" else 1
