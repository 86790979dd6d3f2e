from __future__ import annotations

import pytest

from paceline.errors import EnvironmentLacks, PeerLost, TimedOut
from paceline.transports.network import GlooTransport
from paceline.transports.network_interface import check_interface, has_link


def test_loopback_is_there_and_has_a_link():
    check_interface("lo", "alpha", "Gloo")
    assert has_link("lo")


def test_missing_interface_is_answered_with_those_there_are():
    with pytest.raises(EnvironmentLacks, match=r"host alpha has no .*'eth77' for NCCL.*has .*lo"):
        check_interface("eth77", "alpha", "NCCL")


@pytest.mark.parametrize("name", ["eth77", "a-name-that-is-longer-than-any-interface's"])
def test_interface_that_is_not_there_has_no_link(name):
    assert not has_link(name)


def test_time_out_of_a_library_says_whose_limit_it_was():
    error = GlooTransport().explain(RuntimeError("Timed out waiting 2000ms"))
    assert type(error) is TimedOut
    assert str(error) == (
        "rank 0: a collective of Gloo did not end within 0 s (limits.collective_s): a peer is "
        "blocked or gone. Gloo reports: Timed out waiting 2000ms"
    )


def test_closed_connection_is_a_lost_peer():
    error = GlooTransport().explain(RuntimeError("Connection closed by peer\nframe: timeout"))
    assert type(error) is PeerLost
    assert str(error).endswith("Gloo reports: Connection closed by peer")


def test_other_words_mean_nothing():
    assert GlooTransport().explain(RuntimeError("out of memory")) is None
