"""Control groups of a machine that is not here."""

from __future__ import annotations

from pathlib import Path


class Machine:
    """A /proc and a /sys/fs/cgroup below a temporary folder."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.sys = root / "sys fs"  # a space, as mountinfo escapes it
        self.mounts: list[str] = ["24 1 0:5 / / rw shared:1 - ext4 /dev/root rw"]

    def process(self, pid: int | str, groups: str) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(parents=True)
        (folder / "cgroup").write_text(groups)
        (folder / "mountinfo").write_text("\n".join(self.mounts) + "\n")

    def enter(self, group: str) -> None:
        """Put process 7 into a group of version 2."""
        self.mount("", "cgroup2", "rw")
        self.process(7, f"0::{group}\n")

    def mount(self, folder: str, kind: str, options: str, root: str = "/") -> None:
        point = str(self.sys / folder).rstrip("/").replace(" ", r"\040")
        self.mounts.append(f"30 24 0:26 {root} {point} rw,nosuid - {kind} cgroup {options}")

    def file(self, path: str, text: str) -> None:
        (self.sys / path).parent.mkdir(parents=True, exist_ok=True)
        (self.sys / path).write_text(text)
