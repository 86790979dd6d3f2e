"""Ways of running for fabricated runs: what each part of a step takes, chosen and so known."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Way:
    """One configuration, with the seconds that each part of it takes."""

    launcher: str = "local"
    transport: str = "none"
    local_strategy: str = "sequential"
    nodes: int = 1
    link: str | None = None
    ranks: int = 1  # a node
    threads: int = 1  # a rank
    thread_replicas: int = 1
    stages: int = 1
    micro_batches: int = 4
    schedule: str = "1f1b"
    balance: str | None = "time"
    split_points: tuple[int, ...] | None = None
    reduction: str | None = None
    allocated_cores: int | None = None
    precision: str = "fp32"
    batch_norm: str = "global"
    data_wait_s: float = 0.01
    forward_s: float = 0.2
    backward_s: float = 0.4  # of the last rank; others are `lead_s` faster for each rank before it
    lead_s: float = 0.0
    bubble_s: float = 0.0  # of a stage; counts only with several
    skew_s: float = 0.0  # so much less forward and more bubble with each stage
    transfer_s: float = 0.05
    # communication of layers within the passes; in it, other ranks wait for the last one
    pass_comm_s: float | None = None
    optimizer_s: float = 0.02
    other_s: float = 0.005
    launch_s: float = 0.5
    imports_s: float = 2.0
    rendezvous_s: float = 0.25
    data_load_s: float = 1.0
    model_build_s: float = 0.125
    bookkeeping_s: float = 0.5
    teardown_s: float = 0.25
    clock_offset_s: float = 0.0  # of every rank but the first
    cpu_percent: float = 50.0
    ram_bytes: int = 4_000_000_000  # of the host while training; 2 GB before
    run_rss_bytes: int = 10**9
    run_pss_bytes: int | None = None  # read on every fourth tick
    run_threads: int | None = None  # default 7 a rank
    # of the host while training; without full_trace, an old trace has none of these
    full_trace: bool = False
    others_percent: float = 0.0  # of cpu_percent, used by other processes
    iowait_percent: float = 1.0
    steal_percent: float = 0.0
    throttled_percent: float = 0.0
    cpu_pressure_percent: float = 0.0
    io_pressure_percent: float = 0.0
    disk_bytes_per_s: float = 0.0
    network_bytes_per_s: float = 0.0
    switches_per_s: float = 0.0
    frequency_hertz: float = 2.5e9
    weights_error: float = 0.0  # relative to the update
    gradient_error: float = 0.0
    compression: dict[str, object] | None = None
    averaging: dict[str, int] | None = None
    more_loss: float = 0.0  # than the others have, in every step but the first
    learned: float = 1.5  # of 20 held-out samples, with each step
    sent_bytes: int | None = None  # a step, as rank 0 says; of 4 MB uncompressed
    omp: dict[str, str] = field(default_factory=lambda: {"OMP_NUM_THREADS": "1"})
    affinity: tuple[int, ...] | None = None

    @property
    def replicas(self) -> int:
        return self.nodes * self.ranks // self.stages * self.thread_replicas

    @property
    def world(self) -> int:
        return self.nodes * self.ranks

    @property
    def step_s(self) -> float:
        peers = self.transfer_s + (self.pass_comm_s or 0.0) if self.replicas > 1 else 0.0
        bubble = self.bubble_s if self.stages > 1 else 0.0
        work = self.data_wait_s + self.forward_s + self.backward_s + bubble
        return work + peers + self.optimizer_s + self.other_s


SEQUENTIAL = Way()
INTRAOP = Way(
    local_strategy="intraop",
    threads=2,
    forward_s=0.11,
    backward_s=0.22,
    cpu_percent=97,
    omp={"OMP_NUM_THREADS": "2"},
)
TORCHRUN = Way(
    launcher="torchrun",
    transport="gloo",
    local_strategy="processes",
    ranks=2,
    forward_s=0.1,
    backward_s=0.21,
    lead_s=0.01,
    transfer_s=0.06,
    launch_s=1.5,
    cpu_percent=96,
)
MPI = Way(
    launcher="mpi",
    transport="mpi",
    local_strategy="processes",
    ranks=2,
    forward_s=0.1,
    backward_s=0.2,
    lead_s=0.02,
    transfer_s=0.01,
    launch_s=0.8,
    cpu_percent=98,
)
MPI_GLOO = dataclasses.replace(MPI, transport="gloo", transfer_s=0.055)
SPARK = dataclasses.replace(
    TORCHRUN, launcher="spark", launch_s=9.0, transfer_s=0.065, teardown_s=1.5
)
THREADS = Way(
    local_strategy="threads",
    threads=2,
    thread_replicas=2,
    forward_s=0.12,
    backward_s=0.24,
    transfer_s=0.012,
    cpu_percent=91,
    run_pss_bytes=900_000_000,
)
PROCESSES = Way(
    transport="shared",
    local_strategy="processes",
    ranks=2,
    forward_s=0.1,
    backward_s=0.2,
    lead_s=0.015,
    transfer_s=0.008,
    cpu_percent=98,
    run_pss_bytes=1_300_000_000,
)
PIPELINE = Way(
    transport="shared",
    local_strategy="pipeline",
    ranks=2,
    stages=2,
    micro_batches=8,
    forward_s=0.105,
    backward_s=0.21,
    bubble_s=0.05,
    skew_s=0.01,
    cpu_percent=88,
    run_pss_bytes=1_100_000_000,
)
HYBRID = Way(
    transport="shared",
    local_strategy="hybrid",
    ranks=4,
    stages=2,
    micro_batches=4,
    allocated_cores=2,
    affinity=(0, 1),
    forward_s=0.12,
    backward_s=0.24,
    bubble_s=0.08,
    transfer_s=0.02,
    cpu_percent=95,
    run_pss_bytes=1_700_000_000,
)


def on_nodes(way: Way, nodes: int, **changes: object) -> Way:
    """Return a way under MPI on several nodes, which share the work; all its ranks send."""
    shared = {"forward_s": way.forward_s / nodes, "backward_s": way.backward_s / nodes}
    place = {"launcher": "mpi", "transport": "gloo", "nodes": nodes, "transfer_s": 0.05 * way.ranks}
    return dataclasses.replace(way, **{**shared, **place, **changes})


LOCAL_WAYS = (SEQUENTIAL, INTRAOP, THREADS, PROCESSES, PIPELINE, HYBRID)
