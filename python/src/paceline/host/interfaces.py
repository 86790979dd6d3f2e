"""Network interfaces of this host."""

from __future__ import annotations

import socket

from paceline.errors import EnvironmentLacks
from paceline.host.machine import host_name


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface, by its name as `ip addr` shows it.

    Raises EnvironmentLacks, with the existing interfaces, if it has none.
    """
    import psutil  # noqa: PLC0415  (a single rank does not need it)

    addresses = psutil.net_if_addrs()
    for found in addresses.get(interface, ()):
        if found.family == socket.AF_INET:
            return str(found.address)
    raise EnvironmentLacks(
        f"interface {interface!r} on host {host_name()}: expected one with an IPv4 address; "
        f"interfaces here: {', '.join(addresses)}; name one of them with [network] interface"
    )
