"""One transport between nodes: its link, its algorithms and the messages of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.predict.burden import Burden
from paceline.analysis.predict.link import measured_link, slower_of
from paceline.analysis.predict.node import node_step
from paceline.analysis.predict.overlap import (
    FP32_BYTES,
    Collectives,
    Replay,
    recorded_profile,
    unrecorded_profile,
)
from paceline.analysis.trial.configuration import pipeline_counts
from paceline.analysis.trial.steps import read_steps
from paceline.spec.extensions import TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.analysis.predict.link import Link
    from paceline.analysis.predict.node import NodeStep
    from paceline.analysis.predict.overlap import Profile
    from paceline.analysis.predict.setup import NodeSetup
    from paceline.analysis.trial.reading import TrialRecord

SEED = 20160316  # SEED + 1 and so on for terms that are drawn independently


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
        setups: Sequence[NodeSetup],
        given: Link | None,
    ) -> None:
        """records: all finished trials of the workload. setups: theirs. given: the link; None if it
        is measured."""
        self.transport = transport
        self._setups = setups
        self.algorithms = algorithms_of(transport, records)
        self._collectives = Collectives(algorithms=self.algorithms)
        self.assumptions: list[str] = []
        self._users = [r for r in records if r.trial.transport == transport]
        known = [r.result.parameters for r in records if r.result is not None]
        self._recorded: dict[str, tuple[NodeStep, Profile] | None] = {}
        self._gradient_bytes = float(FP32_BYTES * max(known, default=0))
        self.link = self._link(given)

    def knows_messages(self, setup: NodeSetup) -> bool:
        """Return whether the recorded messages are those of this setup, or like them.

        The stages of a pipeline exchange factors of fewer layers than other strategies do.
        """
        if pipeline_counts(setup.trial) is None:
            return True
        found = self._profile(setup)
        return found is None or not found[2].gathers or setup.holds(found[0])

    def exchanged(
        self, setup: NodeSetup, nodes: NDArray[np.int64], own_s: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the node's own step beside the exchange, and the exposed communication.

        own_s: the step of a node alone, shape (draws, nodes). Returns two arrays of this shape.
        """
        assert self.link is not None
        draws = len(own_s)
        latency_s, bytes_per_s = (values[:, None] for values in self.link.draws(draws, SEED))
        samples = setup.shares(nodes)
        link = (latency_s, bytes_per_s)
        found = self._profile(setup)
        if found is None:
            return own_s, self._unrecorded_s(setup, nodes, own_s, *link)
        record, step, profile = found
        replay = Replay(profile, self._collectives, nodes, samples, own_s, *link)
        burden = self._burden(record, step, profile)
        if burden is not None:
            longer = replace(replay, own_s=own_s * burden.ratio)
            own_s = own_s + burden.seconds(own_s, longer, np.random.default_rng(SEED + 1))
            replay = replace(replay, own_s=own_s)
        return own_s, replay.exposed_s()

    def _unrecorded_s(
        self,
        setup: NodeSetup,
        nodes: NDArray[np.int64],
        own_s: NDArray[np.float64],
        latency_s: NDArray[np.float64],
        bytes_per_s: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Draw the exposed communication where no trial recorded when gradients are ready: between
        no overlap and overlap with the whole computation."""
        rest = (nodes, setup.shares(nodes), own_s, latency_s, bytes_per_s)
        none, full = (
            Replay(
                unrecorded_profile(self._gradient_bytes, lead, 1), self._collectives, *rest
            ).exposed_s()
            for lead in (0.0, setup.computing_share)
        )
        weight = np.random.default_rng(SEED + 2).random((len(own_s), 1))
        self.assumptions.append(
            f"{setup.name} over {self.transport}: no trial recorded when gradients are ready, so "
            "the interval covers no overlap and full overlap with computation"
        )
        return weight * none + (1 - weight) * full

    def _burden(self, record: TrialRecord, step: NodeStep, profile: Profile) -> Burden | None:
        """Return what the exchange adds in this trial; None if it is not known."""
        owner = next((s for s in self._setups if s.holds(record)), None)
        alone_s = None if owner is None else owner.alone_s(step.samples)
        if step.nodes == 1 or alone_s is None:
            return None
        link = measured_link([record], self.algorithms)  # reads the operations of the trial
        if link is None:
            return None
        latency_s, bytes_per_s = (np.array([[value]]) for value in link.middle)
        replay = Replay(
            profile=profile,
            collectives=self._collectives,
            nodes=np.array([step.nodes]),
            samples=np.array([step.samples]),
            own_s=np.array([[step.mean_s]]),
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
        )
        active_s, moved_bytes = replay.beside_own()
        return Burden(
            own_s=alone_s,
            added_s=max(0.0, step.mean_s - alone_s),
            others=1 - 1 / step.nodes,
            active_s=active_s.item(),
            moved_bytes=moved_bytes.item(),
        )

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

    def _profile(self, setup: NodeSetup) -> tuple[TrialRecord, NodeStep, Profile] | None:
        """Return the recorded messages of this setup on several nodes, or of the nearest trial."""
        candidates = [r for r in self._users if r.trial.placement.ranks > 1]
        cores = setup.trial.placement.cores_per_node
        nearest = min(
            candidates,
            key=lambda r: (
                r.trial.placement.nodes == 1,
                not setup.holds(r),
                r.trial.placement.cores_per_node != cores,
            ),
            default=None,
        )
        if nearest is None:
            return None
        if nearest.trial.id not in self._recorded:  # setups share a trial; its files are read once
            self._recorded[nearest.trial.id] = self._read_profile(nearest)
        recorded = self._recorded[nearest.trial.id]
        return None if recorded is None else (nearest, *recorded)

    def _read_profile(self, record: TrialRecord) -> tuple[NodeStep, Profile] | None:
        step = node_step(record)
        if step is None:
            return None
        found = recorded_profile(record, read_steps(record), step.mean_s, step.samples)
        if found is None or not found.messages or found.unknown:
            return None
        if not found.gathers and found.reduced_bytes and self._gradient_bytes:
            # the ranks of a node share its link: the messages of one are scaled to all gradients
            found = found.scaled(self._gradient_bytes / found.reduced_bytes)
        return step, found
