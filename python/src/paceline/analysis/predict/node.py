"""The step of one node without communication between nodes, by its share of the batch.

The time is affine in the samples, t(b) = c0 + c1 b, between the measured shares: each operation has
a fixed cost and one per sample. Below the smallest measured share only bounds are known: a step
does not become longer, and not shorter than in proportion to its samples. Larger shares may not fit
the caches or the memory, so they are refused.

The spread between runs comes from the repeats of whole trials. A prediction is for a new run with
as many repeats, so its error counts twice: in the measured step, and in the new one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.predict.prediction import PredictionRequest, Refusal
from paceline.analysis.statistics.model import Belief
from paceline.analysis.statistics.rates import RepeatRate, RunRates
from paceline.analysis.trial.phases import mean_of_each, trial_phases
from paceline.analysis.trial.reading import TrialRecord, pipeline_counts
from paceline.analysis.trial.steps import global_steps, read_steps, samples_rate
from paceline.plan.spec.extensions import STRATEGIES, TRANSPORTS
from paceline.plan.spec.reduction import StepReduction
from paceline.plan.trials.trial import Trial

DRAWS = 500
_MARGIN = 1.1  # shares up to a tenth outside of the measured ones are accepted
_COMPUTING = ("forward", "backward")
_SEED = 20160316
_MOST_NOISE = 10.0  # of a logarithm, so that a step stays a number


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStep:
    """The steps of one node in one trial."""

    record: TrialRecord
    samples: float  # of the node in a full step
    times: NDArray[np.float64]  # seconds, shape (nodes, steps)
    whole_s: float  # of a step with all communication, as `compare` measures it

    @property
    def nodes(self) -> int:
        return self.record.trial.placement.nodes

    @property
    def mean_s(self) -> float:
        return float(self.times.mean())

    @property
    def source(self) -> tuple[Path, str]:
        """The run directory and the configuration: what has repeats."""
        return self.record.files.root.parent, self.record.trial.configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The step for so many samples of a node, with the spread of whole runs."""

    samples: float
    log_speed: Belief  # in steps per second

    @property
    def log_s(self) -> float:
        return -self.log_speed.value

    def draws(self, generator: np.random.Generator) -> NDArray[np.float64]:
        """Draw the step, shape (DRAWS,)."""
        drawn: NDArray[np.float64] = np.exp(self.log_s + self.noise(generator))
        return drawn

    def noise(self, generator: np.random.Generator) -> NDArray[np.float64]:
        """Draw the error of as many repeats, shape (DRAWS,)."""
        drawn = self.log_speed.draws()
        noise: NDArray[np.float64] = np.median(drawn) - generator.choice(drawn, DRAWS)
        return noise.clip(-_MOST_NOISE, _MOST_NOISE)


def node_step(record: TrialRecord) -> NodeStep | None:
    """Measure the node's step of one trial; None without a step after the warm-up.

    Each rank's time is its step without waiting for other ranks and transfer, if messages carry the
    gradients between ranks; the slowest rank of a node counts. Smaller batches at the end of an
    epoch are left out.
    """
    steps = read_steps(record)
    place = record.trial.placement
    common = global_steps(record, steps)
    steady = common.steady
    rate = samples_rate(record, common)
    if rate is None:
        return None
    batch = np.median(common.samples[steady])
    chosen = np.searchsorted(steps.step, common.step[steady & (common.samples == batch)])
    own = steps["step_s"][:, chosen]
    if TRANSPORTS.get(record.trial.transport).spans_nodes and place.ranks > 1:
        own = own - np.nan_to_num(steps["comm_s"][:, chosen])
    nodes = np.array([rank // place.ranks_per_node for rank in steps.ranks])
    times = np.stack([own[nodes == node].max(axis=0) for node in np.unique(nodes)])
    if not times.size:
        return None
    return NodeStep(
        record=record,
        samples=float(batch) / place.nodes,
        times=times,
        whole_s=float(batch) / rate.rate,
    )


class Spread:
    """Mean steps of the trials of one workload, with the spread between their repeats."""

    def __init__(self, steps: Sequence[NodeStep]) -> None:
        self._own = _means(steps, lambda step: step.mean_s)
        self._whole = _means(steps, lambda step: step.whole_s)

    def own_points(self, steps: Iterable[NodeStep]) -> list[Point]:
        """Return a point for each share without communication; launchers count as repeats."""
        by_share: dict[float, dict[tuple[Path, str], None]] = defaultdict(dict)
        for step in steps:
            by_share[step.samples][step.source] = None
        if not self._own:
            return []
        return [
            _merged(share, [self._own[source] for source in sources])
            for share, sources in sorted(by_share.items())
        ]

    def own(self, step: NodeStep) -> Point | None:
        """Return the mean of a step's configuration without communication."""
        return self._own.get(step.source)

    def fastest(self, steps: Iterable[NodeStep]) -> tuple[NodeStep, Point] | None:
        """Return the fastest measured configuration with all of its communication."""
        known = [step for step in steps if step.source in self._whole]
        first = min(known, key=lambda step: self._whole[step.source].log_s, default=None)
        return None if first is None else (first, self._whole[first.source])


def _means(
    steps: Sequence[NodeStep], seconds: Callable[[NodeStep], float]
) -> dict[tuple[Path, str], Point]:
    """Return the step of each configuration of each run; none if all ran once only.

    All runs together tell how large the noise is.
    """
    places = {(step.source[0], step.record.trial.repeat): None for step in steps}
    column = {place: number for number, place in enumerate(places)}
    samples = {step.source: step.samples for step in steps}
    repeats: dict[str, dict[int, RepeatRate]] = defaultdict(dict)
    for step in steps:
        number = column[step.source[0], step.record.trial.repeat]
        repeats[_key(step.source)][number] = RepeatRate(log_rate=-math.log(seconds(step)))
    rates = RunRates(repeats)
    return {
        source: Point(samples=samples[source], log_speed=found)
        for source in samples
        if rates.has_noise and (found := rates.log_rate(_key(source))) is not None
    }


def _key(source: tuple[Path, str]) -> str:
    run, configuration = source
    return f"{run} {configuration}"


def _merged(samples: float, points: Sequence[Point]) -> Point:
    """Combine configurations that do the same: each of them is equally probable."""
    beliefs = [point.log_speed for point in points]
    number = np.arange(len(beliefs[0].centres))
    chosen = number % len(beliefs)
    return Point(
        samples=samples,
        log_speed=Belief(
            float(np.mean([each.value for each in beliefs])),
            np.stack([each.centres for each in beliefs])[chosen, number],
            np.stack([each.variances for each in beliefs])[chosen, number],
            np.stack([each.seen for each in beliefs])[chosen, number],
        ),
    )


def reduction_between_nodes(trial: Trial) -> StepReduction:
    """Return how several nodes reduce that have the ranks of this trial each.

    By default the ranks of a node sum in its memory then, also where a single node's used messages.
    """
    if trial.placement.nodes > 1:
        return trial.reduction
    in_memory = next(t.name for t in TRANSPORTS.all() if t.joins_ranks and not t.spans_nodes)
    return STRATEGIES.get(trial.local_strategy).reduction(in_memory, trial.strategy_options)


def _is_inside(share: float, points: Sequence[Point]) -> bool:
    """Return whether a share lies among those of the points."""
    if not points:
        return False
    return points[0].samples / _MARGIN <= share <= points[-1].samples * _MARGIN


def is_below(share: NDArray[np.float64], points: Sequence[Point]) -> NDArray[np.bool_]:
    """Tell for each share whether it is smaller than all measured ones."""
    below: NDArray[np.bool_] = share < points[0].samples / _MARGIN
    return below


class NodeSetup:
    """The trials of one node setup and arithmetic, and what is wanted of it."""

    def __init__(
        self, steps: Sequence[NodeStep], spread: Spread, request: PredictionRequest, batch: int
    ) -> None:
        """batch: global one; with weak scaling, that of a node."""
        self.steps, self._spread, self.request, self._batch = steps, spread, request, batch
        self.trial = steps[0].record.trial
        self.name = f"{self.trial.local_strategy} {self.trial.layout}"
        self._ids = {step.record.trial.id for step in steps}
        # times over the mean of their trial, all trials together
        self.ratios = np.concatenate([step.times.ravel() / step.mean_s for step in steps])

    def holds(self, record: TrialRecord) -> bool:
        return record.trial.id in self._ids

    @cached_property
    def points(self) -> list[Point]:
        """The measured steps of a node alone, by its samples in ascending order.

        Steps among several nodes count where no node alone has so many samples, because they have
        the burden of the exchange.
        """
        found = self._spread.own_points(self._alone)
        others = [
            step for step in self.steps if step.nodes > 1 and not _is_inside(step.samples, found)
        ]
        return sorted([*found, *self._spread.own_points(others)], key=lambda point: point.samples)

    @property
    def configuration(self) -> str | None:
        """A configuration on one node that a measurement with another batch can repeat."""
        return self._alone[0].record.trial.configuration if self._alone else None

    @cached_property
    def _alone(self) -> list[NodeStep]:
        """Steps of one node: those of ranks that exchange in its memory, if there are some."""
        alone = [step for step in self.steps if step.nodes == 1]
        within = [
            step for step in alone if not TRANSPORTS.get(step.record.trial.transport).spans_nodes
        ]
        return within or alone

    def shares(self, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the samples of a node for each number of nodes."""
        if self.request.scaling == "weak":
            return np.full(len(nodes), float(self._batch))
        return self._batch / nodes

    def global_batch(self, nodes: int) -> int:
        return self._batch * (nodes if self.request.scaling == "weak" else 1)

    def measured_alone(self) -> tuple[NodeStep, Point] | None:
        """Return the fastest configuration on one node with the batch of one node."""
        return self._spread.fastest(
            step for step in self.steps if step.nodes == 1 and step.samples == self._batch
        )

    def seconds(
        self, share: NDArray[np.float64], generator: np.random.Generator
    ) -> NDArray[np.float64]:
        """Draw the step of a node alone for each share, shape (DRAWS, shares).

        Between two measured shares the line through them counts, so a measured share has its
        measured time.
        """
        between = np.maximum(share, self.points[0].samples / _MARGIN)
        found = self._on_lines(self._drawn_points, between)
        # Below all measured shares the time is anything from constant to proportional.
        constant = generator.random((DRAWS, 1))
        drawn: NDArray[np.float64] = found * (constant + (1 - constant) * share / between)
        return drawn

    @cached_property
    def _drawn_points(self) -> NDArray[np.float64]:
        """Draws of the measured steps, shape (points, DRAWS): the same for all predictions, because
        what a node alone takes is also subtracted from what it takes among several."""
        generator = self.generator("alone")
        return np.stack([point.draws(generator) for point in self.points])

    def generator(self, name: str) -> np.random.Generator:
        """Return draws that are independent of those of other setups and names."""
        training = self.trial.training
        words = f"{training.workload} {self.name} {training.precision} {name}"
        return np.random.default_rng([_SEED, *words.encode()])

    def new_run(
        self, share: NDArray[np.float64], generator: np.random.Generator
    ) -> NDArray[np.float64]:
        """Draw the logarithm by which a new run differs, shape (DRAWS, shares)."""
        distance = np.abs(np.log([[point.samples] for point in self.points] / share))
        noise = np.stack([point.noise(generator) for point in self.points])
        nearest: NDArray[np.float64] = noise[distance.argmin(axis=0)].T
        return nearest

    def alone_s(self, samples: float) -> NDArray[np.float64] | None:
        """Return the draws of the step of a node alone, shape (DRAWS, 1); None where it was not
        measured."""
        if not _is_inside(samples, self.points):
            return None
        return self._on_lines(self._drawn_points, np.array([samples]))

    def among_several(self, step: NodeStep) -> Point | None:
        """Return the mean step of the configuration on several nodes to which a trial belongs."""
        return self._spread.own(step)

    def slowest(self, nodes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return by how much steps are longer because they wait for the slowest of n nodes, shape
        (n,). Nodes that are slow at the same time wait less than independent ones."""
        longer: NDArray[np.float64] = slowest_ratio(self.ratios, nodes) - 1
        return 1 + self._independence * longer

    @cached_property
    def _independence(self) -> float:
        """The waiting of trials on several nodes over that of independent nodes; 1 without one."""
        several = [step.times / step.mean_s for step in self.steps if step.nodes > 1]
        waited = [times.max(axis=0).mean() - 1 for times in several]
        independent = [slowest_ratio(t.ravel(), np.array([len(t)]))[0] - 1 for t in several]
        return min(1.0, sum(waited) / sum(independent)) if sum(independent) > 0 else 1.0

    def unsupported(self, nodes: NDArray[np.int64]) -> Iterator[Refusal]:
        """Yield what the measured shares and steps do not support."""
        if not self.points:
            yield self.refusal(
                nodes,
                "every configuration ran once, so the spread between runs is not known",
                "run it with at least two repeats (--repeats 5)",
            )
            return
        share = self.shares(nodes)
        empty = share < self.trial.placement.replicas_per_node
        large = share > self.points[-1].samples * _MARGIN
        many = (nodes > len(self.ratios)) & ~empty & ~large
        wanted, most = ", ".join(f"{b:g}" for b in np.unique(share[large])), self.points[-1].samples
        for refused, reason, measure in (
            (
                empty,
                f"a replica has less than one sample of the global batch {self._batch}",
                "choose a larger global batch (--global-batch), or fewer nodes",
            ),
            (
                large,
                f"steps were measured with at most {most:g} samples per node, not with {wanted}",
                f"run on one node with global_batch = {wanted}, and give both run directories",
            ),
            (
                many,
                f"the slowest of so many nodes cannot be estimated from {len(self.ratios)} steps",
                "measure more steps (max_steps)",
            ),
        ):
            if refused.any():
                yield self.refusal(nodes[refused], reason, measure)

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
        first = self.steps[0]
        phases = trial_phases(first.record, read_steps(first.record))
        means: Mapping[str, float | None] = mean_of_each([rank.step for rank in phases])
        return sum(means.get(name) or 0.0 for name in _COMPUTING) / first.mean_s

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

    def _on_lines(
        self, values: NDArray[np.float64], share: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return values on the lines between measured points, shape (draws, shares).

        values: at the measured shares, shape (points, draws).
        """
        measured = np.array([point.samples for point in self.points])
        if len(measured) == 1:
            scaled: NDArray[np.float64] = values.T * (share / measured[0])
            return scaled
        right = np.clip(np.searchsorted(measured, share), 1, len(measured) - 1)
        left = right - 1
        weight = (share - measured[left]) / (measured[right] - measured[left])
        on_line: NDArray[np.float64] = values[left].T * (1 - weight) + values[right].T * weight
        return on_line


def slowest_ratio(times: NDArray[np.float64], nodes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the mean of the largest of n times over the mean of one, shape (n,).

    A synchronous step ends with its slowest node. If the nodes' times are independent with
    distribution function F, the largest of n has F^n (H. A. David and H. N. Nagaraja: Order
    Statistics, 3rd edition, 2003, section 2.1). F is that of the measured times, so nothing is
    assumed beyond the largest of them.
    times: of one node, in any order, shape (steps,). nodes: ascending.
    """
    in_order = np.sort(times)
    shares = np.arange(1, len(times)) / len(times)  # F between two times that follow one another
    gaps = np.diff(in_order)
    all_below = np.ones_like(shares)  # F^n, from the one before: there may be a thousand numbers
    found = np.empty(len(nodes))
    for place, further in enumerate(np.diff(nodes, prepend=0).tolist()):
        all_below *= shares**further
        found[place] = in_order[-1] - all_below @ gaps
    ratio: NDArray[np.float64] = found / times.mean()
    return ratio
