"""The socket where ranks meet: on the address asked for and on no other."""

import os
import socket
from pathlib import Path

import pytest

from paceline.errors import EnvironmentLacks
from paceline.job.rendezvous import (
    check_reachable,
    close_listener,
    interface_address,
    listen_on,
)


def listening_addresses(port: int) -> list[str]:
    """Hexadecimal addresses that listen on `port`, from /proc/net/tcp and tcp6 (state 0A)."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            local, _, state = line.split()[1:4]
            address, hexadecimal_port = local.split(":")
            if state == "0A" and int(hexadecimal_port, 16) == port:
                found.append(address)
    return found


def test_loopback_interface_has_the_loopback_address():
    assert interface_address("lo") == "127.0.0.1"


def test_unknown_interface_is_refused_with_those_that_exist():
    with pytest.raises(EnvironmentLacks, match=r"'nosuch0'.*interfaces here: .*\blo\b"):
        interface_address("nosuch0")


def test_socket_listens_on_loopback_alone():
    address = listen_on("lo")
    try:
        assert address.host == "127.0.0.1"
        assert listening_addresses(address.port) == ["0100007F"]  # 127.0.0.1, little-endian
        with socket.create_connection((address.host, address.port), timeout=5):
            pass
    finally:
        close_listener(address)
    assert listening_addresses(address.port) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(address.listen_fd)


def test_hosts_apart_cannot_meet_over_loopback():
    with pytest.raises(EnvironmentLacks, match=r"2 hosts \(a, b\)"):
        check_reachable("lo", ["b", "a", "b"])
    check_reachable("eth0", ["a", "b"])
    check_reachable("lo", ["a", "a"])
