"""Random communication over our back ends gives what Gloo gives, and what arithmetic says.

Few cases here, the same ones each time; programs/fuzz.py runs thousands, of any seed, by hand.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.contract

SEED = 4
CASES = {2: 150, 3: 120, 4: 100}  # by number of ranks


@pytest.mark.parametrize(
    ("backend", "ranks", "options"),
    [
        *((backend, ranks, ()) for backend in ("mpi4py", "paceline") for ranks in CASES),
        ("mpi4py", 3, ("--staged",)),
    ],
)
def test_random_operations_give_what_gloo_and_arithmetic_say(
    backend, ranks, options, run_ranks, tmp_path
):
    words = ("--backend", backend, "--cases", CASES[ranks], "--seed", SEED, *options)
    run_ranks(ranks, "mpi", "fuzz", tmp_path, *words)
