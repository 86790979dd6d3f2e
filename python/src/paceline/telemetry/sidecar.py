"""`paceline sidecar`: one watch by hand, in the foreground."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from paceline.telemetry.handle import (
    SidecarHandle,
    begin_watch,
    sidecar_is_alive,
    start_sidecar,
)
from paceline.telemetry.options import SidecarOptions, add_arguments, options_from

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "SidecarHandle",
    "SidecarOptions",
    "add_arguments",
    "begin_watch",
    "options_from",
    "run_sidecar",
    "sidecar_is_alive",
    "start_sidecar",
]

_TOLD_TO_END = (signal.SIGTERM, signal.SIGINT)
_LOOK_EVERY_S = 0.2


def run_sidecar(options: SidecarOptions) -> None:
    """Watch until SIGTERM or SIGINT, until all watched processes have ended, or until the lifetime
    is over; then a last sample is taken.

    The two signals are blocked in this thread meanwhile and waited for, so none falls between two
    instructions. Raises UsageError if none of the processes exists or the trace cannot be written,
    EnvironmentLacks if no sampler can be started.
    """
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD_TO_END)
    try:
        handle = begin_watch(options)
        try:
            _until_told(handle, _TOLD_TO_END)
        finally:
            handle.stop()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


def _until_told(handle: SidecarHandle, signals: Iterable[signal.Signals]) -> None:
    while not handle.ended:
        if signal.sigtimedwait(signals, _LOOK_EVERY_S):
            return
