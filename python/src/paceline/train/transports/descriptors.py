"""Descriptors of `none`, `shared`, `gloo` and `nccl`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.plan.spec.descriptors import TransportDescriptor
from paceline.plan.spec.models import TrialRequest
from paceline.plan.spec.rules.transport import strategy_of
from paceline.train.transports.bucket_settings import GradientTransport


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
