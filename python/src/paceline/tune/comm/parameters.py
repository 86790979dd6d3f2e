"""Parameters of Open MPI 5 that are worth a trial where [tune] names none.

Names and defaults as `ompi_info --all` of Open MPI 5.0.11 has them. What each does to an all-reduce
of two ranks on one host was tried; over a real network it differs, so it is measured again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.plan.trial import Trial

# Between hosts, by TCP.
_TCP: tuple[dict[str, str], ...] = (
    # large messages in pieces, so that reducing one overlaps with receiving the next (default:
    # in one go; 25 MB over loopback in 7 in place of 10 ms)
    {"btl_tcp_rdma_pipeline_frag_size": "1048576"},
    # windows that hold a fast link's delay (default: the kernel's own choice)
    {"btl_tcp_sndbuf": "4194304", "btl_tcp_rcvbuf": "4194304"},
    {"btl_tcp_links": "2"},
    # without asking the receiver first (default 65536, at most btl_tcp_max_send_size)
    {"btl_tcp_eager_limit": "131072"},
    # messages go on while no rank is in MPI, for the price of a thread
    {"btl_tcp_progress_thread": "1"},
)
# On one host, through shared memory.
_SHARED_MEMORY: tuple[dict[str, str], ...] = (
    # two copies through shared memory in place of one across processes (100 kB in half the time)
    {"smsc": "^cma"},
    {"btl_sm_eager_limit": "32768"},  # default 4096, at most btl_sm_max_send_size
)
# Of MPI's own all-reduce: a ring in segments (25 MB over loopback in 9 in place of 10 ms).
_NATIVE: tuple[dict[str, str], ...] = (
    {
        "coll_tuned_use_dynamic_rules": "true",
        "coll_tuned_allreduce_algorithm": "5",
        "coll_tuned_allreduce_algorithm_segmentsize": "1048576",
    },
)


def usual_parameters(trial: Trial) -> tuple[dict[str, str], ...]:
    """Those that can change how this trial's gradients travel; another MPI may not know them all.

    None on one host where the algorithm is ours to choose: there ranks reduce in memory that they
    share, without messages.
    """
    one_host = trial.placement.nodes == 1
    if one_host and trial.algorithm in (None, "auto"):
        return ()
    native = _NATIVE if trial.algorithm == "native" else ()
    return (_SHARED_MEMORY if one_host else _TCP) + native
