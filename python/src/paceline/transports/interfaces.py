"""Shared code of transports that use a network interface."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.errors import EnvironmentLacks, TimedOut
from paceline.transports.base import PeerLost
from paceline.transports.process_group import DefaultGroupTransport

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.errors import PacelineError
    from paceline.plan.rank_context import RankContext
    from paceline.plan.trial import Trial

# Texts with which Gloo, NCCL and c10d report a time-out.
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_SIOCGIFFLAGS = 0x8913  # netdevice(7), as are the flags
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_IFNAMSIZ = 16


def check_interface(interface: str, host: str, library: str) -> None:
    """Raise EnvironmentLacks, listing the existing interfaces, if this host has no such
    interface."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise EnvironmentLacks(
            f"host {host} has no network interface {interface!r} for {library} to use; it has "
            f"{', '.join(names)}: set [network] interface in the spec"
        )


def has_link(interface: str) -> bool:
    """Return whether the interface exists, is up, and has a carrier."""
    request = struct.pack(f"{_IFNAMSIZ}s16x", interface.encode()[: _IFNAMSIZ - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request)
        except OSError:
            return False
    flags: int = struct.unpack_from("h", answer, _IFNAMSIZ)[0]
    return flags & _IFF_UP != 0 and flags & _IFF_RUNNING != 0


class NetworkTransport(DefaultGroupTransport):
    """A transport of a library that uses one network interface and reports errors as text."""

    library: ClassVar[str]  # name in messages
    peer_lost: ClassVar[re.Pattern[str]]  # texts that report a peer that has ended

    def __init__(self) -> None:
        super().__init__()
        self._rank = 0
        self._limit_s = 0.0
        self._interface = ""

    def open_group(self, context: RankContext, trial: Trial, store: Store, **options: Any) -> None:
        """Open the default process group; translate the errors of the library."""
        self._rank, self._limit_s = context.rank, trial.limits.collective_s
        self._interface = trial.interface
        check_interface(trial.interface, context.host, self.library)
        try:
            super().open_group(context, trial, store, **options)
        except RuntimeError as error:
            meaning = self.explain(error)
            if meaning is None:  # an error must not become its own cause
                raise
            raise meaning from error

    def explain(self, error: Exception) -> PacelineError | None:
        """Return TimedOut or PeerLost if the text of the error reports it, else None."""
        text = self.text_of(error)
        reports = f"{self.library} reports: {text.splitlines()[-1]}"
        # Checked first: after a time-out, a library may also report closed connections.
        if _TIMED_OUT.search(text):
            return TimedOut(
                f"rank {self._rank}: a collective of {self.library} did not end within "
                f"{self._limit_s:g} s (limits.collective_s): a peer is blocked or gone. {reports}"
            )
        if self.peer_lost.search(text):
            return PeerLost(
                f"rank {self._rank}: a peer has ended or closed its connection; look at the other "
                f"ranks' logs. {reports}",
                self._rank,
            )
        return None

    def text_of(self, error: Exception) -> str:
        """Return the text that tells the reason, in its last line."""
        return str(error).strip() or type(error).__name__
