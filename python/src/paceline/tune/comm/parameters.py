"""Parameters of Open MPI 5 that are worth a trial if [tune] names none.

Names and defaults are those of `ompi_info --all` of Open MPI 5.0.11. The effect of each on an
all-reduce between two ranks of one host was tried. It differs over a real network, so it is
measured again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.plan.trial import Trial

# Between hosts, by TCP.
_TCP: tuple[dict[str, str], ...] = (
    # large messages in fragments, so that reducing one overlaps with receiving the next (default:
    # a single fragment; 25 MB over loopback take 7 instead of 10 ms)
    {"btl_tcp_rdma_pipeline_frag_size": "1048576"},
    # socket buffers for links with a large bandwidth-delay product (default: the kernel decides)
    {"btl_tcp_sndbuf": "4194304", "btl_tcp_rcvbuf": "4194304"},
    {"btl_tcp_links": "2"},
    # eager sends without a handshake (default 65536, at most btl_tcp_max_send_size)
    {"btl_tcp_eager_limit": "131072"},
    # messages progress while no rank is inside MPI, at the cost of a thread
    {"btl_tcp_progress_thread": "1"},
)
# On one host, through shared memory.
_SHARED_MEMORY: tuple[dict[str, str], ...] = (
    # two copies through shared memory instead of one across processes (100 kB in half the time)
    {"smsc": "^cma"},
    {"btl_sm_eager_limit": "32768"},  # default 4096, at most btl_sm_max_send_size
)
# MPI's own all-reduce as a segmented ring (25 MB over loopback take 9 instead of 10 ms).
_NATIVE: tuple[dict[str, str], ...] = (
    {
        "coll_tuned_use_dynamic_rules": "true",
        "coll_tuned_allreduce_algorithm": "5",
        "coll_tuned_allreduce_algorithm_segmentsize": "1048576",
    },
)


def usual_parameters(trial: Trial) -> tuple[dict[str, str], ...]:
    """Return parameters that can affect the communication of this trial; another MPI may lack some.

    There are none on one host if the algorithm is not fixed: ranks then reduce in shared memory,
    without messages.
    """
    one_host = trial.placement.nodes == 1
    if one_host and trial.option("algorithm") in (None, "auto"):
        return ()
    native = _NATIVE if trial.option("algorithm") == "native" else ()
    return (_SHARED_MEMORY if one_host else _TCP) + native
