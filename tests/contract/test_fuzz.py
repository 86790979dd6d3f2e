"""Random communication over our back ends gives what Gloo gives, and what arithmetic says.

Few cases here, the same ones each time; programs/fuzz.py runs thousands, of any seed, by hand.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.contract

SEED = 4


@pytest.mark.parametrize("backend", ["mpi4py", "paceline"])
@pytest.mark.parametrize(("ranks", "cases"), [(2, 150), (3, 120), (4, 100)])
def test_random_operations_give_what_gloo_and_arithmetic_say(
    backend, ranks, cases, run_ranks, tmp_path
):
    words = ("--backend", backend, "--cases", cases, "--seed", SEED)
    run_ranks(ranks, "mpi", "fuzz", tmp_path, *words)
