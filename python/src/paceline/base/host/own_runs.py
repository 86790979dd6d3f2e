"""Which run directories this user made on this machine.

A run directory contains names and copies of Python files, and may come from somebody else. What
would run them asks for the user's consent, except for runs that are recorded here. The records are
in a folder that only the user can write, so that no run directory can contain its own.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from paceline.base.errors import UsageError
from paceline.base.host.files import odd_files

_MOST_RECORDS = 10_000  # of about 150 bytes


def remember_run(run_dir: Path) -> None:
    """Record that this user made the run. Without a place for it, nothing is recorded."""
    with suppress(OSError, RuntimeError):  # no home, a full disk: the user will be asked
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = _record(folder, run_dir)
        descriptor = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(_identity(run_dir), file)
        _forget_oldest(folder)


def is_own_run(run_dir: Path) -> bool:
    """Return whether this user made the run that is in the directory."""
    try:
        folder = _folder()
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            return False  # others may write it
        recorded = json.loads(_record(folder, run_dir).read_text(encoding="utf-8"))
        return bool(recorded == _identity(run_dir))
    except (OSError, RuntimeError, ValueError):
        return False


def odd_content(run_dir: Path, unread: str) -> str | None:
    """Return why no command may read or write below a run directory; None if it may.

    A pipe would be waited for. A link could lead what is written to a file of the user, so in the
    run of somebody else none may lead out. unread: name of folders whose files are not read.
    """
    found = odd_files(run_dir, unread)
    if found.irregular is not None:
        return f"{found.irregular}: expected a file, got a pipe, a device or a socket; remove it"
    if found.link_out is not None and not is_own_run(run_dir):
        return (
            f"{found.link_out}: expected a file or folder of the run, got a link to "
            f"{os.path.realpath(found.link_out)}. The run was not made by you on this machine, or "
            "was moved: replace the link by what it leads to, or remove it"
        )
    return None


THE_SPEC = "the programs that its spec names"


def check_own_run(run_dir: Path, runs: str) -> None:
    """Raise UsageError unless this user made the run. runs: the Python code that would run."""
    if not is_own_run(run_dir):
        raise UsageError(
            f"{run_dir}: this would run {runs}, which may be somebody else's: the run was not made "
            "by you on this machine, or was moved. Read the code, then repeat the command with "
            "--trust-run"
        )


def _folder() -> Path:
    """Return $XDG_STATE_HOME/paceline/runs, else ~/.local/state/paceline/runs."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "paceline" / "runs"


def _record(folder: Path, run_dir: Path) -> Path:
    return folder / hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:32]


def _identity(run_dir: Path) -> dict[str, str | int]:
    """Return path and inode: another directory in the same place is another run."""
    return {"path": str(run_dir.resolve()), "inode": run_dir.stat().st_ino}


def _forget_oldest(folder: Path) -> None:
    """Remove the records that are too many.

    A run that cannot be seen is not forgotten: its disk may be mounted again, or only in the mount
    namespace of another process.
    """
    records = list(folder.iterdir())
    if len(records) > _MOST_RECORDS:
        records.sort(key=lambda record: record.stat().st_mtime_ns)
        for record in records[:-_MOST_RECORDS]:
            record.unlink(missing_ok=True)
