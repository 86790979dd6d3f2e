"""What is asked of a host's sampler: a file for each watch in its runtime folder."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import DataError, UsageError
from paceline.records.files import read_json
from paceline.records.layout import HostFiles
from paceline.records.rows import SCHEMA
from paceline.records.typed import typed
from paceline.telemetry.process_ids import ProcessId, boot_id
from paceline.telemetry.runtime import put

if TYPE_CHECKING:
    from paceline.telemetry.options import SidecarOptions
    from paceline.telemetry.runtime import Runtime

TARGETS_VARIABLE = "PACELINE_TARGETS_DIR"
_FORGET_AFTER_S = 60.0
_log = logging.getLogger("paceline.sidecar")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRequest:
    """One watch. Paths are absolute; without `trace` it only keeps the sampler alive."""

    schema: int = SCHEMA
    id: str
    boot_id: str
    requested_unix_s: float
    processes: list[ProcessId]  # roots; without any, the watch lasts as long as its owner
    owner: ProcessId | None = None  # ends the watch by its death
    excluded: list[int] = field(default_factory=list)  # not part of what is watched
    run: str  # its name; the label in metrics may be another (labels.RunLabels)
    facts: dict[str, str] = field(default_factory=dict)
    interval_s: float
    max_lifetime_s: float
    trace: str | None = None
    state: str | None = None
    trial_root: str | None = None
    listen_host: str = "127.0.0.1"
    listen_port: int | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    basic_auth_file: str | None = None
    bearer_token_file: str | None = None
    run_targets: str | None = None  # the run directory's folder of targets
    other_targets: list[str] = field(default_factory=list)
    textfile_dir: str | None = None

    @property
    def key(self) -> str:
        """Of this request alone; a later one for the same trace has another."""
        return f"{self.id}@{self.requested_unix_s!r}"

    @property
    def directory(self) -> str:
        """Of the run; of a trace that belongs to none, its own folder."""
        inside = self.run_targets or self.trace
        return str(Path(inside).parent) if inside else self.id

    @property
    def ends_unix_s(self) -> float:
        return self.requested_unix_s + self.max_lifetime_s

    def is_of_this_boot(self) -> bool:
        """Whether its process numbers mean anything."""
        return self.boot_id == boot_id()

    def keeps_only(self) -> bool:
        """Whether it is there for the sampler to go on between others, and for nothing else."""
        return self.trace is None


def request_of(options: SidecarOptions) -> WatchRequest:
    """The request that stands for `options`. Raises UsageError if no process to watch lives."""
    processes = [found for pid in options.pids if (found := ProcessId.of(pid)) is not None]
    if options.pids and not processes:
        pids = ", ".join(map(str, options.pids))
        raise UsageError(f"sidecar: expected a running process to watch, found none of {pids}")
    itself = ProcessId.of(os.getpid())
    others = [Path(folder) for folder in options.targets_dirs]
    if known := os.environ.get(TARGETS_VARIABLE):
        others.append(Path(known))
    state = options.state
    if state is None and options.out is not None:
        state = beside(options.out, HostFiles(options.out.parent).sidecar)
    unique = f"{options.out.absolute()}" if options.out else f"{os.getpid()} {time.time_ns()}"
    return WatchRequest(
        id=hashlib.sha256(unique.encode()).hexdigest()[:16],
        boot_id=boot_id(),
        requested_unix_s=time.time(),
        processes=processes,
        owner=itself if options.ends_with_caller or not processes else None,
        excluded=[os.getpid()] if options.excludes_caller else [],
        run=options.run or (options.out.absolute().parent.name if options.out else "") or "run",
        facts=dict(options.info),
        interval_s=options.interval_s,
        max_lifetime_s=options.max_lifetime_s,
        trace=_absolute(options.out),
        state=_absolute(state),
        trial_root=_absolute(options.trial_root),
        listen_host=options.listen_host,
        listen_port=options.listen_port,
        tls_certificate=_absolute(options.tls_certificate),
        tls_key=_absolute(options.tls_key),
        tls_client_ca=_absolute(options.tls_client_ca),
        basic_auth_file=_absolute(options.basic_auth_file),
        bearer_token_file=_absolute(options.bearer_token_file),
        run_targets=_absolute(options.run_targets),
        other_targets=[str(folder.absolute()) for folder in dict.fromkeys(others)],
        textfile_dir=_absolute(options.textfile_dir),
    )


def beside(trace: Path, usual: Path) -> Path:
    """`usual`, a file of HostFiles, for a trace under the usual name; for another trace, which may
    not be the only one in its folder, with that trace's name before it."""
    if trace.name == HostFiles(trace.parent).trace.name:
        return usual
    return usual.with_name(f"{trace.stem}-{usual.name}")


def path_of(runtime: Runtime, watch: str) -> Path:
    return runtime.watches / f"{watch}.json"


def write_request(runtime: Runtime, request: WatchRequest) -> None:
    """Raises OSError."""
    put(path_of(runtime, request.id), request)


def read_request(runtime: Runtime, watch: str) -> WatchRequest | None:
    """None if there is no such request, or it cannot be read."""
    path = path_of(runtime, watch)
    try:
        request = typed(read_json(path), WatchRequest, path)
    except (DataError, OSError):
        return None
    return request if request.schema == SCHEMA and request.id == watch else None


def remove_request(runtime: Runtime, watch: str) -> None:
    path_of(runtime, watch).unlink(missing_ok=True)
    account_path(runtime, watch).unlink(missing_ok=True)


def account_path(runtime: Runtime, watch: str) -> Path:
    return runtime.accounts / f"{watch}.json"


def refuse(runtime: Runtime, request: WatchRequest, reason: str) -> None:
    """Remove a request and say why, for the one who asks."""
    put(runtime.refusals / f"{request.id}.json", {"key": request.key, "reason": reason})
    remove_request(runtime, request.id)


def take_refusal(runtime: Runtime, request: WatchRequest) -> str | None:
    """Why this very request was refused; None if it was not."""
    path = runtime.refusals / f"{request.id}.json"
    try:
        told = read_json(path)
    except (DataError, OSError):
        return None
    path.unlink(missing_ok=True)
    return str(told.get("reason")) if told.get("key") == request.key else None


def forget_refusals(runtime: Runtime) -> None:
    """Remove those that nobody has come for."""
    for path in runtime.refusals.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _FORGET_AFTER_S:
                path.unlink()


def all_requests(runtime: Runtime) -> dict[str, WatchRequest]:
    """By id. What cannot be read, or is of another start of the machine, is removed."""
    found = {}
    for path in sorted(runtime.watches.glob("*.json")):
        if path.name.startswith("."):
            continue
        request = read_request(runtime, path.stem)
        if request is not None and request.is_of_this_boot():
            found[request.id] = request
        elif path.exists():
            _log.warning("%s: cannot be read, or is of before the machine started: removed", path)
            remove_request(runtime, path.stem)
    return found


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
