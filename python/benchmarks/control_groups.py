"""Control groups of version 1, which limit what processes may use."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.collectives.host import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

CGROUP = Path("/sys/fs/cgroup")
_LEFT_S = 5.0  # in which processes that were ended leave their group


class Skipped(Exception):  # noqa: N818  (a reason, not an error)
    """A measurement that is not possible on this machine."""


@contextmanager
def control_group(controller: str) -> Iterator[Path]:
    """Make a control group; yields its folder. Raises Skipped without version 1."""
    root = CGROUP / controller
    if not (root / "tasks").exists():
        raise Skipped(f"needs control groups of version 1 with {controller}")
    group = root / f"paceline-seeded-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        wait_until(lambda: _is_removed(group), _LEFT_S)


def _is_removed(group: Path) -> bool:
    """Remove a group; False while processes that end are still in it."""
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def limit_cpu(group: Path, cores: float, period_us: int) -> None:
    """Limit the CPU time of a group's processes in each period of the scheduler."""
    (group / "cpu.cfs_period_us").write_text(str(period_us))
    (group / "cpu.cfs_quota_us").write_text(str(int(period_us * cores)))


def entering(group: Path) -> tuple[str, ...]:
    """Return the words that start a command within a control group."""
    return ("sh", "-c", f'echo $$ > {group}/tasks && exec "$0" "$@"')
