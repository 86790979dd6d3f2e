"""The numbers of a trial: nodes, ranks, threads, replicas and stages."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from paceline.plan.spec.values import FewInt


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCounts:
    """Processes and threads of one node."""

    ranks: int
    threads_per_rank: int
    replicas: int = 1  # copies of the model on the node
    stages: int = 1  # ranks that hold one copy together

    @property
    def threads(self) -> int:
        return self.ranks * self.threads_per_rank


class Placement(BaseModel):
    """The size of a trial: nodes x ranks per node x threads per rank, and the model's copies."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    nodes: FewInt
    ranks_per_node: FewInt
    threads_per_rank: FewInt
    replicas_per_node: FewInt = 1  # copies of the model on a node
    stages: FewInt = 1  # ranks that hold one copy together
    oversubscribe: bool = False
    # Cores that the ranks of a node share, where they are fewer than ranks x threads.
    allocated_cores: FewInt | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def replicas(self) -> int:
        return self.nodes * self.replicas_per_node

    def samples_of_a_replica(self, global_samples: int) -> int:
        """Return the samples of the replica that has the most."""
        return -(-global_samples // self.replicas)

    @property
    def replicas_per_rank(self) -> int:
        """Copies of the model in each rank, one thread or more each."""
        return max(1, self.replicas_per_node * self.stages // self.ranks_per_node)

    @property
    def threads_per_worker(self) -> int:
        """Threads within an operation: of a rank, or of each replica in it."""
        return self.threads_per_rank // self.replicas_per_rank

    @property
    def cores_per_node(self) -> int:
        return self.allocated_cores or self.ranks_per_node * self.threads_per_rank

    @property
    def cores(self) -> int:
        return self.nodes * self.cores_per_node


def number(count: int | str | None) -> int | None:
    """Return a count that was given as a number; None for "auto" and where nothing was given."""
    return count if isinstance(count, int) else None


def divisors(cores: int) -> list[int]:
    """Return the divisors from two up: numbers of workers that get equally many cores."""
    return [count for count in range(2, cores + 1) if cores % count == 0]
