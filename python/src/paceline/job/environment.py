"""The variables that every launcher sets alike, because left alone they disagree.

Spark sets OMP_NUM_THREADS to spark.task.cpus, torchrun to 1, mpirun not at all. The worker sets
and checks its threads itself; these are for libraries that read them before the worker runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.plan.trial import Trial

# Set by the runner to the name of the host that it watches itself, for the ranks there.
SIDECAR_HOST_VARIABLE = "PACELINE_SIDECAR_HOST"
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def rank_environment(trial: Trial) -> dict[str, str]:
    """Sizes of thread pools for every rank, and output that reaches the log when it is written."""
    threads = str(trial.threads_per_worker)  # replicas in threads have a pool each
    return {
        **dict.fromkeys(THREAD_VARIABLES, threads),
        "OMP_DYNAMIC": "FALSE",
        "PYTHONUNBUFFERED": "1",
    }
