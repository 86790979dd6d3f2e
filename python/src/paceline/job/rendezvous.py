"""The socket of the rendezvous: rank 0 binds it to one address and then publishes the address."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.errors import EnvironmentLacks
from paceline.plan.trial import LOOPBACK
from paceline.training.context import StoreAddress

if TYPE_CHECKING:
    from collections.abc import Iterable

_SIOCGIFADDR = 0x8915  # netdevice(7)
_IFNAMSIZ = 16
_BACKLOG = 1024


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface, by its name as `ip addr` shows it.

    Raises EnvironmentLacks, with the existing interfaces, if it has none.
    """
    request = struct.pack(f"{_IFNAMSIZ}s16x", interface.encode()[: _IFNAMSIZ - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise EnvironmentLacks(
                f"interface {interface!r} on host {socket.gethostname()}: expected one with an "
                f"IPv4 address ({error}); interfaces here: {known}; name one of them with "
                "[network] interface or --interface"
            ) from error
    return socket.inet_ntoa(answer[20:24])  # ifreq.ifr_addr.sin_addr


def listen_on(interface: str) -> StoreAddress:
    """Listen on a free port of the interface's address only.

    The caller owns `listen_fd`. Raises EnvironmentLacks if the interface has no address.
    """
    host = interface_address(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
        port: int = listener.getsockname()[1]
        return StoreAddress(host=host, port=port, listen_fd=listener.detach())


def close_listener(address: StoreAddress) -> None:
    """Close a socket that is not needed after all."""
    if address.listen_fd is not None:
        with suppress(OSError):
            socket.socket(fileno=address.listen_fd).close()


def check_reachable(interface: str, hosts: Iterable[str]) -> None:
    """Raise EnvironmentLacks if ranks on several hosts would communicate over loopback."""
    names = sorted(set(hosts))
    if len(names) > 1 and interface == LOOPBACK:
        raise EnvironmentLacks(
            f"ranks are on {len(names)} hosts ({', '.join(names)}), which {interface!r} does not "
            "connect; name the interface between them with [network] interface or --interface"
        )
