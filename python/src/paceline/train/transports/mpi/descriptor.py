"""Descriptor of `mpi`: MPI as a backend of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.collectives.message_schedules import Algorithm
from paceline.plan.costs import ALL_REDUCE
from paceline.plan.spec.extensions import LAUNCHERS
from paceline.plan.spec.models import TrialRequest
from paceline.plan.spec.placement import Placement
from paceline.train.transports.bucket_settings import (
    GradientKeys,
    GradientOptions,
    GradientTransport,
    planned_options,
)


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
    implementation = "paceline.train.transports.mpi.transport:MpiTransport"
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
