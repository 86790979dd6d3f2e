"""One transport between nodes: its link, its algorithms and the messages of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.predict.link import measured_link, slower_of
from paceline.analysis.predict.node import node_step
from paceline.analysis.predict.overlap import (
    Collectives,
    exposed_s,
    recorded_profile,
    unrecorded_profile,
)
from paceline.analysis.steps import read_steps
from paceline.spec.extensions import TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.analysis.predict.link import Link
    from paceline.analysis.predict.overlap import Profile
    from paceline.analysis.predict.setup import NodeSetup
    from paceline.analysis.reading import TrialRecord
    from paceline.analysis.simulation.job import Topology

_GRADIENT_BYTES = 4  # of a parameter: gradients are sent as fp32
SEED = 20160316


def algorithms_of(transport: str, records: Sequence[TrialRecord]) -> tuple[str, ...]:
    """Return the all-reduce algorithms of a transport between nodes, with the records' options."""
    same = [r.trial for r in records if r.trial.transport == transport]
    descriptor = TRANSPORTS.get(transport)
    options = same[0].transport_options if same else descriptor.Options()
    return descriptor.all_reduce_algorithms(2, options)


class Network:
    """One transport between the nodes of one workload's trials."""

    def __init__(
        self,
        transport: str,
        records: Sequence[TrialRecord],
        given: Link | None,
        topology: Topology | None,
    ) -> None:
        """records: all finished trials of the workload. given: the link; None if it is measured.
        topology: simulate contention in it."""
        self.transport = transport
        self.algorithms = algorithms_of(transport, records)
        self._collectives = Collectives(algorithms=self.algorithms, topology=topology)
        self.assumptions: list[str] = []
        self._users = [r for r in records if r.trial.transport == transport]
        known = [r.result.parameters for r in records if r.result is not None]
        self._gradient_bytes = float(_GRADIENT_BYTES * max(known, default=0))
        self.link = self._link(given)

    def exposed_s(
        self, setup: NodeSetup, nodes: NDArray[np.int64], own_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the exposed communication of a step, shape (draws, nodes).

        own_s: the node's step without communication, shape (draws, nodes).
        """
        assert self.link is not None
        draws = len(own_s)
        latency_s, bytes_per_s = (values[:, None] for values in self.link.draws(draws, SEED))
        rest = (nodes, setup.shares(nodes), own_s, latency_s, bytes_per_s)
        profile = self._profile(setup)
        if profile is not None:
            return exposed_s(profile, self._collectives, *rest)
        # without records of gradients: between no overlap and overlap with the whole computation
        none, full = (
            exposed_s(unrecorded_profile(self._gradient_bytes, lead, 1), self._collectives, *rest)
            for lead in (0.0, setup.computing_share)
        )
        weight = np.random.default_rng(SEED).random((draws, 1))
        self.assumptions.append(
            f"{setup.name} over {self.transport}: no trial recorded when gradients are ready, so "
            "the interval covers no overlap and full overlap with computation"
        )
        return weight * none + (1 - weight) * full

    def _link(self, given: Link | None) -> Link | None:
        several = [r for r in self._users if r.trial.placement.nodes > 1]
        if given is None:
            link = measured_link(several, self.algorithms)
            if link is not None:
                self.assumptions.append(f"link of {self.transport}: {link.source}")
            return link
        alone = [
            r for r in self._users if r.trial.placement.nodes == 1 and r.trial.placement.ranks > 1
        ]
        host = measured_link(alone, self.algorithms) or measured_link(several, self.algorithms)
        if host is None:
            self.assumptions.append(
                f"hosts move the bytes of {self.transport} as fast as the link: no trial measured "
                "it"
            )
        return slower_of(given, host)

    def _profile(self, setup: NodeSetup) -> Profile | None:
        """Return the recorded messages of this setup on several nodes, or of the nearest trial."""
        own = {r.trial.id for r in setup.records}
        candidates = [r for r in self._users if r.trial.placement.ranks > 1]
        nearest = min(
            candidates,
            key=lambda r: (r.trial.placement.nodes == 1, r.trial.id not in own),
            default=None,
        )
        step = None if nearest is None else node_step(nearest)
        if nearest is None or step is None:
            return None
        found = recorded_profile(nearest, read_steps(nearest), step.mean_s, step.samples)
        if found is None or not found.messages or found.unknown:
            return None
        if found.gathers or not found.reduced_bytes or not self._gradient_bytes:
            return found
        # the ranks of a node share its link: the messages of one are scaled to all gradients
        return found.scaled(self._gradient_bytes / found.reduced_bytes)
