"""A program of anybody's that uses the backend and loses a peer."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.contract


def test_program_that_caught_the_error_ends_although_its_peer_is_frozen(run_ranks, tmp_path):
    # MPI_Finalize would wait for the peer for ever; run_ranks fails if the program does not end
    run_ranks(2, "mpi", "leaving", tmp_path, 1, orderly=False)
    assert " 1 s" in (tmp_path / "caught").read_text()
