"""Descriptors of transports, and of the methods of gradient compression."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from paceline.collectives.message_schedules import Algorithm
from paceline.plan.costs import ALL_REDUCE
from paceline.plan.spec.descriptors import Compression, KeyModel, TransportDescriptor
from paceline.plan.spec.extensions import LAUNCHERS
from paceline.plan.spec.models import TrialRequest
from paceline.plan.spec.placement import Placement
from paceline.plan.spec.rules.transport import strategy_of
from paceline.plan.spec.values import PositiveInt
from paceline.train.transports.bucket_settings import (
    GradientKeys,
    GradientOptions,
    GradientTransport,
    planned_options,
)

DEFAULT_POWERSGD_RANK = 4  # as Vogels et al. (PowerSGD, NeurIPS 2019) use for language models
DEFAULT_DENSITY = 0.01  # Lin et al. (Deep Gradient Compression, ICLR 2018) send 0.1 to 1 %


class NoTransport(TransportDescriptor):
    """Nothing to carry."""

    name = "none"
    summary = "one rank, nothing is sent"
    position = 10
    devices = ("cpu", "cuda")
    spans_nodes = False
    joins_ranks = False
    opens_process_group = False

    def auto_priority(self, request: TrialRequest) -> int | None:
        return 50


class Shared(TransportDescriptor):
    """The memory of one node."""

    name = "shared"
    summary = "the memory that the ranks of one node share"
    position = 20
    devices = ("cpu", "cuda")  # activations of a pipeline pass through the memory of the CPU
    spans_nodes = False
    opens_process_group = False

    def auto_priority(self, request: TrialRequest) -> int | None:
        return 40

    def faults(self, request: TrialRequest) -> Iterator[str]:
        strategy = strategy_of(request)
        if request.device != "cpu" and strategy is not None and not strategy.uses_node_memory:
            yield '"shared" carries the memory of CPUs, got device = "cuda"'


class Gloo(GradientTransport):
    """Gloo over TCP."""

    name = "gloo"
    summary = "torch's Gloo, over TCP"
    position = 30
    implementation = "paceline.train.transports.network:GlooTransport"
    devices = ("cpu", "cuda")
    serves_scripts = True
    sends_messages = True

    def auto_priority(self, request: TrialRequest) -> int | None:
        return 10

    def all_reduce_algorithms(self, nodes: int, options: Any) -> tuple[str, ...]:
        """Return Gloo's default algorithm, a ring in segments (gloo/allreduce.cc)."""
        return ("ring",)


class SharedMemory(GradientTransport):
    """Shared memory within a host, Gloo between hosts."""

    name = "paceline"
    summary = "shared memory within a host, Gloo between hosts"
    position = 35
    implementation = "paceline.train.transports.network:SharedMemoryTransport"
    serves_scripts = True
    sends_messages = True

    def auto_priority(self, request: TrialRequest) -> int | None:
        """The default on one node for strategies that send data by collectives.

        Others use the memory of the node themselves, or send messages between two ranks, which are
        those of Gloo here, too. On several nodes only `reduction = "flat"` would gain.
        """
        strategy = strategy_of(request)
        by_collectives = strategy is not None and strategy.needs_process_group
        return 30 if by_collectives and request.nodes == 1 else None

    def all_reduce_algorithms(self, nodes: int, options: Any) -> tuple[str, ...]:
        """Return Gloo's default algorithm, by which hosts exchange their sums."""
        return ("ring",)


class Nccl(GradientTransport):
    """NVIDIA's collectives."""

    name = "nccl"
    summary = "NVIDIA's NCCL, between GPUs"
    position = 50
    implementation = "paceline.train.transports.network:NcclTransport"
    devices = ("cuda",)
    joins_flat_only = True
    serves_scripts = True

    def auto_priority(self, request: TrialRequest) -> int | None:
        return 45


class MpiTransportKeys(GradientKeys):
    """Keys of transport `mpi`."""

    algorithm: Algorithm | None = None


class MpiOptions(GradientOptions):
    """Planned options of transport `mpi`."""

    algorithm: Algorithm = "auto"

    def name_parts(self, placement: Placement) -> Iterator[str]:
        if self.algorithm != "auto":
            yield self.algorithm
        yield from super().name_parts(placement)

    def labels(self) -> Iterator[str]:
        yield from super().labels()
        if self.algorithm != "auto":
            yield self.algorithm


class MpiTransportDescriptor(GradientTransport):
    """MPI between the ranks of one MPI job."""

    name = "mpi"
    summary = "MPI, in a job that the launcher joins"
    position = 40
    implementation = "paceline.train.transports.mpi:MpiTransport"
    Keys = MpiTransportKeys
    Options = MpiOptions
    needs = "mpi job"
    serves_scripts = True
    sends_messages = True

    def auto_priority(self, request: TrialRequest) -> int | None:
        """The default between nodes where the launcher prefers it."""
        preferred = LAUNCHERS.get(request.launcher).default_transport == self.name
        return 20 if preferred else None

    def all_reduce_algorithms(self, nodes: int, options: MpiOptions) -> tuple[str, ...]:
        """Return what a calibration chooses from, or the one in the options."""
        if options.algorithm in {"auto", "hierarchical"}:
            return ("recursive-doubling", "ring", "rabenseifner")
        return (options.algorithm,) if options.algorithm in ALL_REDUCE else ()

    def options(self, request: TrialRequest) -> MpiOptions:
        algorithm = request.keys(MpiTransportKeys).algorithm or "auto"
        return MpiOptions(**planned_options(request), algorithm=algorithm)


class PowerSgdKeys(KeyModel):
    """Keys of `powersgd`."""

    compression_rank: PositiveInt | None = None  # of the approximation


class TopKKeys(KeyModel):
    """Keys of `topk`."""

    # part of the elements that is sent
    compression_density: Annotated[float, Field(gt=0, le=1, strict=False)] | None = None


def _powersgd_numbers(request: TrialRequest) -> dict[str, int | float]:
    return {"rank": request.keys(PowerSgdKeys).compression_rank or DEFAULT_POWERSGD_RANK}


def _topk_numbers(request: TrialRequest) -> dict[str, int | float]:
    return {"density": request.keys(TopKKeys).compression_density or DEFAULT_DENSITY}


# In the order of lists.
COMPRESSIONS = (
    Compression(
        name="bf16",
        summary="gradients as bfloat16",
        implementation="paceline.train.transports.compression:bf16",
    ),
    Compression(
        name="fp16",
        summary="gradients as float16",
        implementation="paceline.train.transports.compression:fp16",
    ),
    Compression(
        name="powersgd",
        summary="low-rank factors of every matrix",
        implementation="paceline.train.transports.compression:PowerSgd",
        Keys=PowerSgdKeys,
        numbers=_powersgd_numbers,
    ),
    Compression(
        name="topk",
        summary="the elements with the largest magnitudes",
        implementation="paceline.train.transports.compression:TopK",
        Keys=TopKKeys,
        numbers=_topk_numbers,
    ),
    Compression(
        name="terngrad",
        summary="ternary gradients, 2 bits an element",
        implementation="paceline.train.transports.compression:TernGrad",
    ),
    Compression(
        name="int8",
        summary="blocks of 8-bit integers with a scale each",
        implementation="paceline.train.transports.compression:int8",
    ),
)
