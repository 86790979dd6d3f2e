"""Control groups of version 1, which limit what processes may use."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.host.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.lab.record import Host

CGROUP = Path("/sys/fs/cgroup")
_LEFT_S = 5.0  # in which processes that were ended leave their group


class Skipped(Exception):  # noqa: N818  (a reason, not an error)
    """A measurement that is not possible on this machine."""


@contextmanager
def control_group(controller: str, name: str = "seeded") -> Iterator[Path]:
    """Make a control group; yields its folder. Raises Skipped without version 1."""
    root = CGROUP / controller
    if not (root / "tasks").exists():
        raise Skipped(f"needs control groups of version 1 with {controller}")
    group = root / f"paceline-{name}-{os.getpid()}"
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


@contextmanager
def slower_host(host: Host, cores: float, period_us: int) -> Iterator[None]:
    """Limit the CPU time of a lab's host.

    Its processes are started by others inside of namespaces that do not show control groups, so
    the group is mounted outside of /sys.
    """
    with control_group("cpu", host.name) as group, tempfile.TemporaryDirectory() as mounted:
        limit_cpu(group, cores, period_us)
        subprocess.run(["mount", "--bind", group, mounted], check=True)
        try:
            first, _, rest = host.entrance.read_text().partition("\n")
            host.entrance.write_text(f"{first}\necho $$ > {mounted}/tasks || exit 1\n{rest}")
            yield
        finally:
            subprocess.run(["umount", "--lazy", mounted], check=True)
