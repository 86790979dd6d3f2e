"""Environment variables that every launcher sets to the same values.

Their own defaults differ: Spark sets OMP_NUM_THREADS to spark.task.cpus, torchrun to 1, mpirun not
at all. The worker sets and checks its threads itself; the variables are for libraries that read
them earlier.
"""

from __future__ import annotations

from paceline.plan.trial import Trial

# The runner sets it to the name of its own host, where it starts the sidecar itself.
SIDECAR_HOST_VARIABLE = "PACELINE_SIDECAR_HOST"
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def rank_environment(trial: Trial) -> dict[str, str]:
    """Return the sizes of thread pools for every rank, and the setting for unbuffered output."""
    threads = str(trial.placement.threads_per_worker)  # a replica has a pool of its own
    return {
        **dict.fromkeys(THREAD_VARIABLES, threads),
        "OMP_DYNAMIC": "FALSE",
        "PYTHONUNBUFFERED": "1",
    }
