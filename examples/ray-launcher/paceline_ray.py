"""A launcher for Paceline: each rank is an actor of Ray on this node.

`Ray` is the descriptor, `RayLauncher` the command side. `main` and `Rank` are the job side, started
as `python -m paceline_ray --trial trial.json`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

from paceline.base.errors import EnvironmentLacks
from paceline.plan.spec.descriptors import LauncherDescriptor

if TYPE_CHECKING:
    from paceline.measure.records.layout import TrialFiles
    from paceline.plan.trials.trial import Trial
    from paceline.runner.job import Job, RankEnd, StoreAddress
    from paceline.runner.launchers.base import Command

# Read by Ray at its import and by the processes that it starts.
_RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
_OBJECT_STORE_BYTES = 100_000_000  # Paceline's tensors do not pass through Ray's object store
_OTHERS_S = 5.0  # how long the other ranks may still run after a failure


class Ray(LauncherDescriptor):
    """Descriptor: actors of Ray on this node."""

    name = "ray"
    summary = "actors of Ray on this node"
    implementation = "paceline_ray:RayLauncher"


class RayLauncher:
    """Command side: checks before the start, and the command."""

    def preflight(self, trial: Trial) -> None:
        """Raise EnvironmentLacks if the trial cannot run here."""
        from paceline.runner.preflight.this_host import check_trial

        if importlib.util.find_spec("ray") is None:
            raise EnvironmentLacks('launcher "ray" needs Ray: pip install "ray==2.49.2"')
        check_trial(trial)

    def command(self, trial: Trial, files: TrialFiles) -> Command:
        """Return the command that runs `main`."""
        from paceline.runner.job.context import rank_environment
        from paceline.runner.launchers.base import Command

        argv = (sys.executable, "-m", "paceline_ray", "--trial", str(files.trial))
        return Command(argv=argv, environment={**rank_environment(trial), **_RAY_ENVIRONMENT})

    def failed_rank(self, log_text: str) -> int | None:  # noqa: ARG002
        """Return None: Ray's log names no rank, and `finish` reports a lost actor."""
        return None


class Rank:
    """Job side of one rank; an actor."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job = job
        self._rank = rank
        self._address: StoreAddress | None = None

    def listen(self) -> StoreAddress:
        """Open the rendezvous socket; called on rank 0."""
        from paceline.runner.job import listen_on

        self._address = listen_on(self._job.trial.interface)
        return self._address.for_peers()

    def train(self, first: StoreAddress, launcher_pid: int) -> RankEnd:
        """Train as this rank."""
        from paceline.collectives.host import host_name
        from paceline.runner.job import rank_context, run_rank

        address = self._address or first
        hosts = [host_name()] * self._job.trial.placement.ranks
        return run_rank(self._job, rank_context(self._rank, hosts, address), [launcher_pid])


def main() -> int:
    """Start one actor per rank, wait for all of them, and return the exit code."""
    import ray

    from paceline.runner.job import finish, parse_job, prepare, trial_end

    job = parse_job("ray", "python -m paceline_ray")
    prepare(job)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=job.trial.placement.ranks,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            ends = _train(job)
        finally:
            ray.shutdown()
    end = trial_end(job, ends)
    finish(job, end)
    return end.exit_code


def _train(job: Job) -> list[RankEnd | None]:
    """Return how each rank ended, by rank; None for a lost actor.

    Wait for the others only a few seconds after the first failure.
    """
    import ray

    actor = ray.remote(num_cpus=1, max_restarts=0)(Rank)
    ranks = [actor.remote(job, rank) for rank in range(job.trial.placement.ranks)]
    first = ray.get(ranks[0].listen.remote(), timeout=job.trial.limits.rendezvous_s)
    waiting = {r.train.remote(first, os.getpid()): i for i, r in enumerate(ranks)}
    ends: list[RankEnd | None] = [None] * len(ranks)
    deadline = time.monotonic() + job.trial.limits.trial_s
    while waiting and time.monotonic() < deadline:
        ready, _ = ray.wait(list(waiting), timeout=1.0)
        for reference in ready:
            rank = waiting.pop(reference)
            ends[rank] = _end_of(reference)
            if ends[rank] is None or ends[rank].error is not None:
                deadline = min(deadline, time.monotonic() + _OTHERS_S)
    return ends


def _end_of(reference: Any) -> RankEnd | None:
    """Return how a rank ended; None if its actor died without an answer."""
    import ray

    from paceline.runner.job import say

    try:
        end: RankEnd = ray.get(reference)
    except ray.exceptions.RayError as error:
        say(f"Ray lost an actor: {str(error).splitlines()[0]}")
        return None
    return end


if __name__ == "__main__":
    from paceline_ray import main as imported_main  # actors import this module by its name

    from paceline.runner.job import run_guarded

    sys.exit(run_guarded(imported_main))
