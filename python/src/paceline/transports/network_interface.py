"""Network interfaces of this host."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks

if TYPE_CHECKING:
    pass

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
