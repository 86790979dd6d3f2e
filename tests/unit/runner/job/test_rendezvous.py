"""The socket where ranks meet: on the address asked for and on no other."""

import os
import socket
from pathlib import Path

import pytest

from paceline.base.errors import EnvironmentLacks, TimedOut
from paceline.collectives.host import interface_address
from paceline.runner.job.job import (
    check_reachable,
    close_listener,
    exchange_address,
    listen_on,
)
from paceline.runner.job.rank_status import RankEnd
from paceline.runner.job.run_directory import finish


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


def test_rank_1_finds_the_socket_of_rank_0(job):
    own = listen_on("lo")
    first = exchange_address(job, 0, own, "start 1")
    second = exchange_address(job, 1, None, "start 1")
    close_listener(own)
    assert first is own
    assert (second.host, second.port, second.listen_fd) == ("127.0.0.1", own.port, None)
    assert second == own.for_peers()


def test_file_of_the_address_is_for_this_user_and_goes_with_the_trial(job):
    own = listen_on("lo")
    close_listener(exchange_address(job, 0, own, "start 1"))
    assert (job.files.root / "rendezvous.json").stat().st_mode & 0o777 == 0o600
    finish(job, RankEnd(rank=0))
    assert not (job.files.root / "rendezvous.json").exists()


def test_every_start_has_a_secret_of_its_own():
    addresses = [listen_on("lo") for _ in range(2)]
    for address in addresses:
        close_listener(address)
    assert len({address.secret for address in addresses}) == 2
    assert all(len(address.secret) >= 32 for address in addresses)


def test_address_of_an_earlier_start_is_not_used(make_job):
    job, own = make_job(rendezvous_s=0.2), listen_on("lo")
    close_listener(exchange_address(job, 0, own, "start 1"))
    with pytest.raises(TimedOut, match=r"rank 1 waited 0\.2 s for rank 0"):
        exchange_address(job, 1, None, "start 2")
