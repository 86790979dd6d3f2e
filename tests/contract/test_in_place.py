"""Buckets of DDP that are reduced where they are."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.contract

ROUNDING = 1e-6
BUCKETS = 2  # of the program


@pytest.mark.parametrize(("backend", "ranks"), [("paceline", 2), ("paceline", 3), ("gloo", 2)])
def test_gradients_are_those_of_all_rows(run_ranks, tmp_path, backend, ranks):
    run_ranks(ranks, "mpi", "in_place", tmp_path, backend)
    for rank in range(ranks):
        found = json.loads((tmp_path / f"in_place.{rank}.json").read_text())
        assert found["largest"] < ROUNDING
        assert found["others"] == (BUCKETS * (ranks - 1) if backend == "paceline" else 0)
