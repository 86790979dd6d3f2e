"""Watching from the run that is watched.

Whatever goes wrong here is a warning: a run without its trace is still a run.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from paceline.errors import DataError, PacelineError, PacelineWarning
from paceline.host.machine import host_name
from paceline.records.files import read_json
from paceline.telemetry.keeper import Keeper
from paceline.telemetry.process_ids import ProcessId
from paceline.telemetry.runtime import runtime_of
from paceline.telemetry.watches import request_of

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.telemetry.options import SidecarOptions
    from paceline.telemetry.runtime import SamplerState


class SidecarHandle:
    """A watch that has begun; `pid` is the sampler's that has it, `port` that of its metrics, None
    if it serves none."""

    def __init__(self, keeper: Keeper, state: SamplerState) -> None:
        self._keeper = keeper
        self.pid = state.process.pid
        self.port = state.port

    @property
    def ended(self) -> bool:
        """Whether the watch is over although nobody ended it."""
        return self._keeper.ended.is_set()

    def wait(self, limit_s: float) -> bool:
        """Wait for that, `limit_s` at most; whether it is over."""
        return self._keeper.ended.wait(limit_s)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Have the last sample taken and wait for it. May be called twice."""
        self._keeper.stop(timeout_s)


def begin_watch(options: SidecarOptions) -> SidecarHandle:
    """Have the host's sampler do as `options` say; it is started if there is none.

    Raises UsageError if there is nothing to watch, EnvironmentLacks if no sampler can be had.
    """
    keeper = Keeper(runtime_of(), request_of(options))
    state = keeper.start()
    if note := state.notes.get(keeper.request.key):
        _warn(note)
    return SidecarHandle(keeper, state)


def start_sidecar(options: SidecarOptions) -> SidecarHandle | None:
    """As begin_watch; what fails is told as a PacelineWarning, and None comes back."""
    try:
        return begin_watch(options)
    except (PacelineError, OSError) as error:
        what = str(error).removeprefix("sidecar: ")
        _warn(f"{what}; this host's trace may be missing from the report")
        return None


def sidecar_is_alive(state: Path) -> bool:
    """Whether the watch that `state` tells of goes on, on this host; False if there is no such
    file, if it is another host's, or if the sampler's process id went to another process."""
    try:
        document = read_json(state)
    except (DataError, OSError):
        return False
    pid, start_ticks = document.get("pid"), document.get("start_ticks")
    if document.get("host") != host_name() or document.get("ended") is not None:
        return False
    if not isinstance(pid, int) or not isinstance(start_ticks, int):
        return False
    return ProcessId(pid, start_ticks).is_alive()


def _warn(what: str) -> None:
    warnings.warn(f"sidecar: {what}", PacelineWarning, stacklevel=4)
