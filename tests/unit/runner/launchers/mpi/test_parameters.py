"""What an Open MPI says of its parameters, read from a made-up `ompi_info`."""

import pytest
from tests.support.fake_programs import program

from paceline.runner.launchers.mpi.implementations import known_parameters, unknown_parameters

SAID = """\
package:Open MPI made up
mca:btl:tcp:version:"mca:2.1.0"
mca:btl:tcp:param:btl_tcp_links:value:1
mca:btl:tcp:param:btl_tcp_links:help:a param:not_one:value:3
mca:smsc:base:param:smsc:value:
mca:smsc:base:param:smsc_base_verbose:enumerator:value:-1:none
"""


@pytest.fixture
def mpirun(tmp_path):
    """Beside it, an `ompi_info` that says SAID."""
    program(tmp_path / "ompi_info", SAID)
    return tmp_path / "mpirun"


def test_names_with_a_value_are_the_parameters(mpirun):
    assert known_parameters(mpirun) == frozenset({"btl_tcp_links", "smsc"})


def test_unknown_name_is_told_with_one_like_it(mpirun):
    assert unknown_parameters(["smsc", "btl_tcp_links"], mpirun) is None
    told = unknown_parameters(["smsc", "btl_tcp_link"], mpirun)
    assert "no parameter btl_tcp_link, did you mean btl_tcp_links?" in told


@pytest.mark.parametrize("said", [None, "", "no such thing"])
def test_mpi_that_does_not_say_is_not_asked_again(tmp_path, said):
    if said is not None:
        program(tmp_path / "ompi_info", said)
    assert known_parameters(tmp_path / "mpirun") is None
    assert unknown_parameters(["anything"], tmp_path / "mpirun") is None
