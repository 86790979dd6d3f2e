"""Ranks that torchrun started find their place in its variables."""

import pytest

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.runner.launchers.torchrun import torchrun_place

STARTED = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}


def test_place_comes_from_torchruns_variables():
    assert torchrun_place(STARTED) == (1, 2)


def test_process_that_torchrun_did_not_start_is_refused():
    with pytest.raises(UsageError, match="expected torchrun to start this process"):
        torchrun_place({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})


def test_several_nodes_are_refused():
    with pytest.raises(EnvironmentLacks, match=r"expected 2 ranks .* torchrun started 4"):
        torchrun_place({**STARTED, "WORLD_SIZE": "4"})
