from __future__ import annotations

import pytest

from paceline.errors import EnvironmentLacks, TimedOut
from paceline.transports.interfaces import check_interface, has_link, time_out_of


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
    error = time_out_of("Timed out waiting 2000ms", "Gloo", 3, 2.0)
    assert type(error) is TimedOut
    assert str(error) == (
        "rank 3: a collective of Gloo did not end within 2 s (limits.collective_s): a peer is "
        "blocked or gone. Gloo reports: Timed out waiting 2000ms"
    )


def test_other_words_are_no_time_out():
    assert time_out_of("Connection closed by peer", "Gloo", 0, 2.0) is None
