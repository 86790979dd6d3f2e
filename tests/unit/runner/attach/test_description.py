"""The command of `paceline watch -- COMMAND` as a trial."""

from __future__ import annotations

import pytest

from paceline.base.errors import UsageError
from paceline.collectives.gloo_group import BACKEND
from paceline.measure.records.layout import TrialFiles
from paceline.runner.attach.rank import AttachedRank, planned_trial, trial_as_found


def trial(folder, launcher="torchrun", ranks=2):
    place = AttachedRank(launcher=launcher, rank=0, ranks=ranks)
    return planned_trial(TrialFiles(folder / "train.r0"), place, 4)


def test_ranks_of_a_launcher_are_processes(tmp_path):
    found = trial(tmp_path)
    assert (found.id, found.launcher, found.local_strategy) == ("train.r0", "torchrun", "processes")
    assert (found.placement.ranks, found.placement.cores) == (2, 4)
    assert found.training.script is not None


def test_one_process_has_threads_and_no_transport(tmp_path):
    found = trial_as_found(trial(tmp_path, "local", 1), backend="gloo", device="cpu", threads=3)
    assert (found.local_strategy, found.transport) == ("intraop", "none")
    assert found.placement.threads_per_rank == 3


@pytest.mark.parametrize(
    ("backend", "device", "transport"),
    [
        (BACKEND, "cpu", "gloo"),
        ("nccl", "cuda", "nccl"),
        ("mpi4py", "cpu", "mpi"),
        ("undefined", "cuda", "nccl"),
        ("undefined", "cpu", "gloo"),
        (None, "cpu", "gloo"),
    ],
)
def test_the_transport_is_that_of_the_group(tmp_path, backend, device, transport):
    found = trial_as_found(trial(tmp_path), backend=backend, device=device, threads=1)
    assert (found.transport, found.device) == (transport, device)


def test_an_unknown_back_end_is_named(tmp_path):
    with pytest.raises(UsageError, match="gloo, mpi4py, nccl, got ucc"):
        trial_as_found(trial(tmp_path), backend="ucc", device="cpu", threads=1)
