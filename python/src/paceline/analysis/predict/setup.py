"""One node setup, its measured steps, and the steps that they support."""

from __future__ import annotations

from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from paceline.analysis.predict.node import NodeModel, node_model, node_step
from paceline.analysis.predict.prediction import Refusal
from paceline.analysis.trial.configuration import pipeline_counts
from paceline.analysis.trial.phases import mean_over_ranks, trial_phases
from paceline.analysis.trial.steps import read_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from paceline.analysis.predict.node import NodeStep
    from paceline.analysis.predict.prediction import Request
    from paceline.analysis.trial.reading import TrialRecord

_COMPUTING = ("forward", "backward")
_BEFORE_STEPS = ("launch", "imports", "data_load")


class NodeSetup:
    """The trials of one node setup and arithmetic, and what is wanted of it."""

    def __init__(self, records: Sequence[TrialRecord], request: Request) -> None:
        self.records, self.request = records, request
        self.trial = records[0].trial
        self.name = f"{self.trial.local_strategy} {self.trial.layout}"
        self._ids = {r.trial.id for r in records}
        batches = [r.trial.training.global_batch for r in records]
        self._batch = request.global_batch or max(batches)

    def holds(self, record: TrialRecord) -> bool:
        return record.trial.id in self._ids

    @cached_property
    def _measured(self) -> list[tuple[TrialRecord, NodeStep]]:
        return [(r, step) for r in self.records if (step := node_step(r)) is not None]

    @cached_property
    def model(self) -> NodeModel | None:
        """The measured steps of a node alone; None if there is none after the warm-up.

        Steps among several nodes count where no node alone supports their share: they have the
        burden of the exchange.
        """
        steps = [step for _, step in self._measured]
        alone = [step for step in steps if step.nodes == 1]
        if not alone:
            return node_model(steps, steps) if steps else None
        supports = node_model(alone, steps).supports
        others = [s for s in steps if s.nodes > 1 and not supports(np.array([s.samples]))[0]]
        return node_model([*alone, *others], steps)

    def alone_s(self, samples: float) -> float | None:
        """Return the step of a node alone, in seconds; None where it is not supported."""
        share = np.array([samples])
        if self.model is None or not self.model.supports(share)[0]:
            return None
        return float(self.model.mean_s(share)[0])

    def shares(self, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the samples of a node for each number of nodes."""
        if self.request.scaling == "weak":
            return np.full(len(nodes), float(self._batch))
        return self._batch / nodes

    def global_batch(self, nodes: int) -> int:
        return self._batch * (nodes if self.request.scaling == "weak" else 1)

    def unsupported(self, model: NodeModel | None, nodes: NDArray[np.int64]) -> Iterator[Refusal]:
        """Yield what the measured shares and steps do not support."""
        if model is None:
            yield self.refusal(
                nodes, "no step after the warm-up was measured", "measure more steps"
            )
            return
        share = self.shares(nodes)
        empty = share < self.trial.placement.replicas_per_node
        if empty.any():
            reason = f"a replica has less than one sample of the global batch {self._batch}"
            measure = "choose a larger global batch (--global-batch), or fewer nodes"
            yield self.refusal(nodes[empty], reason, measure)
        outside = ~model.supports(share) & ~empty
        if outside.any():
            yield self._outside(model, nodes[outside])
        many = (nodes > len(model.ratios)) & ~empty & ~outside
        if many.any():
            steps = f"{len(model.ratios)} steps"
            reason = f"the slowest of so many nodes cannot be estimated from {steps}"
            yield self.refusal(nodes[many], reason, "measure more steps (max_steps)")

    def refusal(
        self, nodes: NDArray[np.int64], reason: str, measure: str, transport: str | None = None
    ) -> Refusal:
        return Refusal(
            workload=self.trial.training.workload,
            setup=self.name,
            transport=transport,
            nodes=tuple(nodes.tolist()),
            reason=reason,
            measure=measure,
        )

    @cached_property
    def computing_share(self) -> float:
        """Forward and backward pass as a share of the node's step."""
        record, step = self._measured[0]
        phases = trial_phases(record, read_steps(record))
        means = mean_over_ranks([rank.step for rank in phases])
        return sum(means.get(name) or 0.0 for name in _COMPUTING) / step.mean_s

    @property
    def bubble_factor(self) -> float:
        """Ratio of steps with the requested and the measured number of micro-batches.

        A step of s stages and m micro-batches of equal times takes (m + s - 1) / m of its
        computation (Huang et al., GPipe, NeurIPS 2019, section 2.3).
        """
        counts = pipeline_counts(self.trial)
        if counts is None or self.request.micro_batches is None:
            return 1.0
        stages, measured = counts
        wanted = self.request.micro_batches
        return (1 + (stages - 1) / wanted) / (1 + (stages - 1) / measured)

    @cached_property
    def start_s(self) -> dict[str, float]:
        """Time before the steps (launch, imports, data loading) by launcher; medians."""
        found: dict[str, list[float]] = {}
        for record, _ in self._measured:
            means = mean_over_ranks([r.whole for r in trial_phases(record, read_steps(record))])
            known = [s for name in _BEFORE_STEPS if (s := means.get(name)) is not None]
            if known:
                found.setdefault(record.trial.launcher, []).append(sum(known))
        return {launcher: median(seconds) for launcher, seconds in found.items()}

    def _outside(self, model: NodeModel, nodes: NDArray[np.int64]) -> Refusal:
        measured = " and ".join(f"{b:g}" for b in sorted({model.shares[0], model.shares[-1]}))
        needed = sorted({max(1, round(float(b))) for b in self.shares(nodes)})
        ends = ", ".join(map(str, sorted({needed[0], needed[-1]})))
        return self.refusal(
            nodes,
            f"steps were measured with {measured} samples per node, not with {ends}",
            f"run on one node with global_batch = {ends}, in a run of its own, and give both "
            "run directories",
        )
