"""The rank of a process of `paceline watch -- COMMAND`, from the variables of its launcher."""

from __future__ import annotations

import importlib

import pytest

from paceline.base.errors import EnvironmentLacks
from paceline.runner.attach import rank
from paceline.runner.attach.rank import AttachedRank, own_place
from paceline.runner.attach.startup import sitecustomize

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, AttachedRank(launcher="local", rank=0, ranks=1)),
        (TORCHRUN, AttachedRank(launcher="torchrun", rank=1, ranks=2)),
        (OPEN_MPI, AttachedRank(launcher="mpi", rank=2, ranks=3)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, AttachedRank(launcher="mpi", rank=0, ranks=2)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, AttachedRank(launcher="local", rank=1, ranks=4)),
        ({**OPEN_MPI, **TORCHRUN}, AttachedRank(launcher="torchrun", rank=1, ranks=2)),
    ],
)
def test_a_rank_is_found_by_the_variables_of_its_launcher(environment, place):
    assert own_place(environment) == place


def test_ranks_on_several_hosts_are_refused():
    with pytest.raises(EnvironmentLacks, match="all ranks on this host, found 2 of 4"):
        own_place({**TORCHRUN, "WORLD_SIZE": "4"})


def test_the_start_of_python_looks_for_the_variables_of_every_launcher() -> None:
    """It may import only the standard library, so it has their names once more."""
    assert {name for name, *_ in rank._VARIABLES} == set(sitecustomize._RANK_VARIABLES)
    runner = importlib.import_module("paceline.runner.trials.attach")  # a function has its name
    assert runner._FOLDER_VARIABLE == sitecustomize._FOLDER_VARIABLE
