"""Shared code of transports that use a network interface: its state, and time-out errors."""

from __future__ import annotations

import fcntl
import re
import socket
import struct

from paceline.errors import EnvironmentLacks, TimedOut

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


def time_out_of(
    text: str, library: str, rank: int, limit_s: float, said: str | None = None
) -> TimedOut | None:
    """Return TimedOut if the text of the library's error reports a time-out, else None.

    said: the part of the text to quote, if not all of it.
    """
    if not _TIMED_OUT.search(text):
        return None
    return TimedOut(
        f"rank {rank}: a collective of {library} did not end within {limit_s:g} s "
        f"(limits.collective_s): a peer is blocked or gone. {library} reports: {said or text}"
    )
