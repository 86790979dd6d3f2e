"""Random communication over our back ends gives what Gloo gives, and what arithmetic says.

Amid faults it gives that, or errors on all ranks in time. Few cases here, the same ones each time.
programs/fuzz.py runs thousands of any seed by hand, and `-m soak` runs thousands amid faults.
"""

from __future__ import annotations

import json

import pytest
from tests.contract.programs.fuzz_faults import (
    Call,
    Episode,
    Long,
    judge,
    judge_files,
    run_session,
    sessions,
)

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


@pytest.mark.parametrize(
    ("left", "lost", "faults"),
    [("scatter", 2, 0), ("all_reduce", 2, 1), ("scatter", 1, 1)],
    ids=["left early", "all ranks leave together", "another rank"],
)
def test_an_error_before_the_fault_is_one_unless_the_victim_was_ahead(left, lost, faults):
    calls = [Call(name, 8, "float32", 0, is_asynchronous=False) for name in ("barrier", left)]
    steps = (*calls, *[calls[0]] * 4)
    episode = Episode(steps, "interrupt", victim=2, other=calls[0], delay_s=0.0)
    seen = (
        f"error PeerLost: rank 0: shared memory {left}: rank {lost} has failed while rank 0 waited"
    )
    behind = ["right", seen, *["error GroupClosed"] * 4]
    victim = ["right", "right", "interrupted", *["error GroupClosed"] * 3]
    outcomes = {0: behind, 2: victim}
    found = judge(episode, {rank: [(one, 0.0) for one in each] for rank, each in outcomes.items()})
    assert len(found) == faults


EPISODES = {2: 24, 4: 12}  # by number of ranks


@pytest.mark.parametrize("ranks", EPISODES)
def test_steps_amid_faults_are_right_or_an_error_on_every_rank(ranks, forks, tmp_path):
    found = []
    for first, last in sessions(SEED, EPISODES[ranks], ranks, kills=True):
        found += run_session(forks.python, tmp_path, SEED, first, last, ranks)
    assert found == []


def test_steps_over_mpi_amid_faults_are_right_or_an_error_on_every_rank(run_ranks, tmp_path):
    last = 11
    run_ranks(3, "mpi", "fuzz_faults", tmp_path, SEED, 0, last, orderly=False)
    assert judge_files(tmp_path, SEED, 0, last, 3, kills=False) == []


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_thousands_of_steps_amid_faults_are_right_or_an_error_on_every_rank(
    forks, tmp_path_factory, pytestconfig
):
    seed, episodes, minutes = (
        pytestconfig.getoption(f"--soak-{name}") for name in ("seed", "count", "minutes")
    )
    found = Long(seed, episodes, minutes).run(forks.python)
    (tmp_path_factory.getbasetemp() / "fuzz.json").write_text(json.dumps(found))
    assert found["wrong"] == []
