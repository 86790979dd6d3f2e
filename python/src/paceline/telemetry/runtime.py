"""Where the sampler of a host and those who want something watched meet.

One folder for each user and host: a lock that the sampler holds for its life, who and where it is,
and a request for each watch. Nobody else may write there, as what stands there is carried out.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import stat
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import DataError, EnvironmentLacks
from paceline.host.machine import host_name
from paceline.records.files import read_json
from paceline.records.rows import SCHEMA
from paceline.records.typed import typed
from paceline.telemetry.process_ids import ProcessId

if TYPE_CHECKING:
    from collections.abc import Mapping

RUNTIME_VARIABLE = "PACELINE_RUNTIME_DIR"
_ONLY_OURS = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """Who the sampler is, and what it does with each request (`sampler.json`)."""

    schema: int = SCHEMA
    process: ProcessId
    listen: str | None = None
    port: int | None = None  # None: it serves no metrics
    scheme: str = "http"
    watches: list[str] = field(default_factory=list)  # WatchRequest.key
    notes: dict[str, str] = field(default_factory=dict)  # what a watch should be told, by key
    runs: dict[str, str] = field(default_factory=dict)  # labels in metrics, by run directory
    targets: list[str] = field(default_factory=list)  # files by which Prometheus finds it


@dataclass(frozen=True, slots=True)
class Runtime:
    """The files of one host's sampler."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def sampler(self) -> Path:
        return self.root / "sampler.json"

    @property
    def log(self) -> Path:
        return self.root / "sampler.log"

    @property
    def watches(self) -> Path:
        return self.root / "watches"

    @property
    def accounts(self) -> Path:
        """What a new sampler must know to go on where a dead one stopped, by watch."""
        return self.root / "accounts"

    @property
    def refusals(self) -> Path:
        """Why a watch was refused, until the one who asked for it has read it."""
        return self.root / "refusals"

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.watches, self.accounts, self.refusals)

    def last_state(self) -> SamplerState | None:
        """What a sampler told last, which may have died meanwhile."""
        try:
            return typed(read_json(self.sampler), SamplerState, self.sampler)
        except (DataError, OSError):
            return None

    def state(self) -> SamplerState | None:
        """Of the sampler that lives; None if there is none, or it has not said so yet."""
        state = self.last_state()
        return state if state is not None and state.process.is_alive() else None

    def is_locked(self) -> bool:
        """Whether a sampler runs."""
        descriptor = _open_lock(self.lock)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(descriptor)

    def take_lock(self, limit_s: float = 0.0) -> int | None:
        """The lock, for the life of the descriptor; None if another sampler has it.

        limit_s: for others' `is_locked` holds it for an instant.
        """
        descriptor = _open_lock(self.lock)
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    os.close(descriptor)
                    return None
                time.sleep(_POLL_S)
            else:
                return descriptor


def runtime_of(host: str | None = None, environment: Mapping[str, str] = os.environ) -> Runtime:
    """The runtime folder of `host` (this one), made where it is not there.

    It is $PACELINE_RUNTIME_DIR, else $XDG_RUNTIME_DIR/paceline, else paceline-UID in the folder
    for temporary files. Raises EnvironmentLacks where it cannot be made or others may write to it.
    """
    base = _base(environment)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", host or host_name()).lstrip(".") or "_"
    runtime = Runtime(base / name)
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for folder in (base, runtime.root, *runtime.folders):
            folder.mkdir(mode=_ONLY_OURS, exist_ok=True)
            _check_ours(folder)
    except OSError as error:
        raise EnvironmentLacks(
            f"runtime directory {base}: expected to be able to write there: {error}; choose "
            f"another with {RUNTIME_VARIABLE}"
        ) from error
    return runtime


def _base(environment: Mapping[str, str]) -> Path:
    if chosen := environment.get(RUNTIME_VARIABLE):
        return Path(chosen).absolute()
    session = environment.get("XDG_RUNTIME_DIR")
    # sudo and su hand over that of the user who called them
    if session and Path(session).is_dir() and Path(session).stat().st_uid == os.geteuid():
        return Path(session) / "paceline"
    return Path(tempfile.gettempdir()) / f"paceline-{os.geteuid()}"


def _check_ours(folder: Path) -> None:
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        fault = "is not a directory"
    elif about.st_uid != os.geteuid():
        fault = f"belongs to user {about.st_uid}"
    elif about.st_mode & _OTHERS_WRITE:
        fault = f"may be written to by others (mode {stat.S_IMODE(about.st_mode):o})"
    else:
        return
    raise EnvironmentLacks(
        f"runtime directory {folder}: expected a directory of user {os.geteuid()} that nobody "
        f"else may write to, but it {fault}; remove it, or choose another with {RUNTIME_VARIABLE}"
    )


def put(path: Path, document: object) -> None:
    """Replace `path` atomically by a dataclass or mapping as JSON.

    Not durably, as records.files does: it means nothing once the machine has gone down.
    """
    fields: Any = (
        dataclasses.asdict(document)
        if dataclasses.is_dataclass(document) and not isinstance(document, type)
        else document
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(fields), encoding="utf-8")
    temporary.replace(path)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
