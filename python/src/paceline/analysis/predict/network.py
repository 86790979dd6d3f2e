"""One transport between nodes: its link, its algorithms and the messages of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.predict.exchange import (
    Burden,
    ExchangeProfile,
    Links,
    NodeLink,
    Replay,
    added_s,
    declared_profile,
    given_link,
    measured_links,
    recorded_profile,
    slower_of,
)
from paceline.analysis.predict.node import (
    DRAWS,
    NodeSetup,
    NodeStep,
    Point,
    node_step,
    reduction_between_nodes,
)
from paceline.analysis.trial.reading import TrialRecord
from paceline.analysis.trial.steps import read_steps
from paceline.plan.spec.extensions import TRANSPORTS
from paceline.plan.spec.reduction import StepReduction
from paceline.plan.spec.values import bits_per_s


def algorithms_of(transport: str, records: Sequence[TrialRecord]) -> tuple[str, ...]:
    """Return the all-reduce algorithms of a transport between nodes, with the records' options."""
    same = [r.trial for r in records if r.trial.transport == transport]
    descriptor = TRANSPORTS.get(transport)
    options = same[0].transport_options if same else descriptor.Options()
    return descriptor.all_reduce_algorithms(2, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """The messages of a trial between several ranks."""

    record: TrialRecord
    step: NodeStep
    profile: ExchangeProfile


class Network:
    """One transport between the nodes of one workload's trials."""

    def __init__(
        self,
        transport: str,
        records: Sequence[TrialRecord],
        setups: Sequence[NodeSetup],
        given: NodeLink | None,
    ) -> None:
        """records: all finished trials of the workload. setups: theirs. given: the link; None if it
        is measured."""
        self.transport = transport
        self._setups = setups
        self.algorithms = algorithms_of(transport, records)
        self.assumptions: list[str] = []
        self._users = [
            r for r in records if r.trial.transport == transport and r.trial.placement.ranks > 1
        ]
        known = [r.result.parameters for r in records if r.result is not None]
        self._parameters = max(known, default=0)
        self._read: dict[Path, _Recorded | None] = {}
        self._given = given
        self._links = self._limited_links()

    def why_not(self, setup: NodeSetup) -> tuple[str, str] | None:
        """Return why a setup cannot be predicted, and what to do; None if it can be."""
        strategy, reduction = setup.trial.local_strategy, reduction_between_nodes(setup.trial)
        if not reduction.is_predictable:
            return (
                f'"{strategy}" does not say what it exchanges between nodes',
                "measure it on several nodes, or choose another local strategy",
            )
        if not self.algorithms:
            return "time between nodes has no model", "measure on several nodes"
        if self._links is None and len(rates := self._measured_rates()) > 1:
            named = [rate or "not limited" for rate in rates]
            limited = [rate for rate in rates if rate is not None]
            return (
                f"trials on several nodes have different links: {', '.join(named)}",
                f"choose one (--link {limited[-1]})",
            )
        if self._links is None:
            return (
                "no trial on several nodes measured the link",
                "give the link (--link 10gbit), or run one configuration on two nodes",
            )
        found = self._recorded(setup)
        return None if found is None else _why_unusable(setup, reduction, found)

    def exchanged(
        self,
        setup: NodeSetup,
        nodes: NDArray[np.int64],
        own_s: NDArray[np.float64],
        generator: np.random.Generator,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the node's own step beside the exchange, and the exposed communication.

        own_s: the step of a node alone, shape (draws, nodes). Returns two arrays of this shape.
        """
        reduction = reduction_between_nodes(setup.trial)
        assert self._links is not None, "why_not"
        latency_s, bytes_per_s = _rates(self._links, generator.random((2, DRAWS)))
        replicas = setup.trial.placement.replicas_per_node
        found = self._recorded(setup)
        replay = Replay(
            profile=declared_profile(reduction, self._parameters, 0.0),
            algorithms=self.algorithms,
            nodes=nodes,
            samples=setup.shares(nodes),
            own_s=own_s,
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            ranks_per_node=replicas if reduction.among == "ranks" else 1,
        )
        if found is None:
            return own_s, self._declared_s(setup, reduction, replay, generator)
        other = reduction_between_nodes(found.record.trial)
        profile = found.profile.scaled(reduction.bytes_per_parameter / other.bytes_per_parameter)
        profile = profile if reduction.in_buckets else profile.without_overlap()
        replay = replace(replay, profile=profile)
        burden = self._burden(found, generator)
        if burden is not None:
            own_s = own_s + added_s(replay, burden, generator)
            replay = replace(replay, own_s=own_s)
        return own_s, replay.exposed_s()

    def _declared_s(
        self,
        setup: NodeSetup,
        reduction: StepReduction,
        replay: Replay,
        generator: np.random.Generator,
    ) -> NDArray[np.float64]:
        """Draw the exposed communication where no trial recorded when gradients are ready: between
        no overlap and, if the strategy overlaps, overlap with the whole computation."""
        exposed_s = replay.exposed_s()
        covered = "no overlap"
        if reduction.in_buckets:
            full = declared_profile(reduction, self._parameters, setup.computing_share)
            weight = generator.random((DRAWS, 1))
            exposed_s = (
                weight * exposed_s + (1 - weight) * replace(replay, profile=full).exposed_s()
            )
            covered = "no overlap and full overlap with computation"
        self.assumptions.append(
            f"{setup.name} over {self.transport}: no trial recorded when gradients are ready, so "
            f"the interval covers {covered}"
        )
        return exposed_s

    def several(self, setup: NodeSetup) -> Point | None:
        """Return the mean step of the trials on several nodes that show the messages of a setup;
        None without one."""
        found = self._recorded(setup)
        if found is None or found.step.nodes == 1:
            return None
        owner = self._owner(found)
        return None if owner is None else owner.among_several(found.step)

    def _owner(self, found: _Recorded) -> NodeSetup | None:
        return next((setup for setup in self._setups if setup.holds(found.record)), None)

    def _burden(self, found: _Recorded, generator: np.random.Generator) -> Burden | None:
        """Return what the trials on several nodes show; None if one of its parts is not known."""
        step, owner = found.step, self._owner(found)
        if step.nodes == 1 or owner is None:
            return None
        several, alone_s = owner.among_several(step), owner.alone_s(step.samples)
        links = measured_links([found.record], self.algorithms)  # reads the operations of the trial
        if several is None or alone_s is None or links is None:
            return None
        latency_s, bytes_per_s = _rates(links, np.full((2, 1), 0.5))
        replay = Replay(
            found.profile,
            self.algorithms,
            np.array([step.nodes]),
            np.array([step.samples]),
            np.exp([[several.log_s]]),
            latency_s,
            bytes_per_s,
        )
        several_s = several.draws(generator)[:, None]
        return Burden(replay=replay, several_s=several_s, alone_s=alone_s)

    def _limited_links(self) -> Links | None:
        """Return the link, which hosts may limit; None if it is neither given nor measured, or
        trials measured several."""
        several = [r for r in self._users if r.trial.placement.nodes > 1]
        given = self._given
        if given is None:
            if len(self._measured_rates()) > 1:
                return None
            links = measured_links(several, self.algorithms)
            if links is not None:
                self.assumptions.append(f"link of {self.transport}: {links[0].source}")
            return links
        alone = [r for r in self._users if r.trial.placement.nodes == 1]
        # a link that is slower than the given one tells nothing of the hosts
        fastest = [r for r in several if r.link == self._measured_rates()[-1]]
        hosts = measured_links(alone, self.algorithms) or measured_links(fastest, self.algorithms)
        if hosts is None:
            self.assumptions.append(
                f"hosts move the bytes of {self.transport} as fast as the link: no trial measured "
                "it"
            )
            return given, given
        beside, after = (slower_of(given, host) for host in hosts)
        return beside, after

    def _measured_rates(self) -> list[str | None]:
        """Return the links of trials on several nodes, the slowest first; None: not limited."""
        rates = {r.link for r in self._users if r.trial.placement.nodes > 1}
        return sorted(rates, key=lambda rate: math.inf if rate is None else bits_per_s(rate))

    def _recorded(self, setup: NodeSetup) -> _Recorded | None:
        """Return the messages of this setup on several nodes, or of the most similar trial."""
        cores = setup.trial.placement.cores_per_node
        in_order = sorted(
            self._users,
            key=lambda r: (
                r.trial.placement.nodes == 1,
                not setup.holds(r),
                not self._is_on_link(r),
                r.trial.placement.cores_per_node != cores,
            ),
        )
        for record in in_order:
            folder = record.files.root
            if folder not in self._read:  # setups share a trial; files are read once
                self._read[folder] = self._read_messages(record)
            found = self._read[folder]
            if found is not None:
                return found
        return None

    def _is_on_link(self, record: TrialRecord) -> bool:
        """Return whether a trial had the given link: its messages need no other rate then."""
        if self._given is None or record.link is None:
            return self._given is None
        return given_link(bits_per_s(record.link)).bytes_per_s == self._given.bytes_per_s

    def _read_messages(self, record: TrialRecord) -> _Recorded | None:
        reduction, step = reduction_between_nodes(record.trial), node_step(record)
        if step is None or not reduction.is_predictable:
            return None
        gradient_bytes = reduction.bytes_per_parameter * self._parameters
        steps = read_steps(record)
        found = recorded_profile(record, steps, step.mean_s, step.samples, gradient_bytes)
        if found is None or not found.messages:
            return None
        if not found.gathers and found.reduced_bytes and gradient_bytes:
            # the ranks of a node share its link: the messages of one are scaled to all gradients
            found = found.scaled(gradient_bytes / found.reduced_bytes)
        return _Recorded(record=record, step=step, profile=found)


def _rates(links: Links, places: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return latencies and bandwidths at places between the bounds, shape (2, links, count, 1)."""
    return np.stack([link.at(places) for link in links], axis=1)[..., None]


def _why_unusable(
    setup: NodeSetup, reduction: StepReduction, found: _Recorded
) -> tuple[str, str] | None:
    """Return why recorded messages do not tell those of a setup, and what to do; None if they do.

    The stages of a pipeline send the factors of fewer layers than other strategies do.
    """
    if found.profile.unknown:
        return (
            f"its steps have operations without a model: {', '.join(found.profile.unknown)}",
            "measure on several nodes",
        )
    other = reduction_between_nodes(found.record.trial)
    is_like = (other.among == "stages") == (reduction.among == "stages")
    if found.profile.gathers and not (is_like or setup.holds(found.record)):
        return (
            "no trial on several nodes measured which linear layers of its stages send factors",
            "run it on two nodes",
        )
    return None
