"""Descriptor of `parameter-server`: servers own shards of the weights, workers push gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field

from paceline.plan.spec.descriptors import KeyModel, OptionModel
from paceline.plan.spec.models import Experiment, TrialRequest
from paceline.plan.spec.placement import NodeCounts, Placement
from paceline.plan.spec.reduction import StepReduction
from paceline.plan.spec.values import PositiveInt, Whole
from paceline.train.strategies.descriptors import ProcessPerReplica, without_all_reduce

# When servers apply gradients, and what workers wait for.
UpdateMode = Literal["synchronous", "asynchronous", "stale-synchronous", "shat"]
DEFAULT_STALENESS_BOUND_STEPS = 1
_WITH_PERIODS = ("asynchronous", "shat")


class ParameterServerKeys(KeyModel):
    """Keys of `parameter-server`."""

    update_mode: UpdateMode | None = None
    push_period_steps: PositiveInt | None = None  # from one push of gradients to the next
    fetch_period_steps: PositiveInt | None = None  # from one fetch of weights to the next
    # how far a worker may be ahead of the slowest one
    staleness_bound_steps: Whole | None = None


class ParameterServerOptions(OptionModel):
    """Planned options of `parameter-server`."""

    update_mode: UpdateMode = "synchronous"
    push_period_steps: PositiveInt = 1
    fetch_period_steps: PositiveInt = 1
    staleness_bound_steps: int | None = Field(default=None, ge=0)  # of stale-synchronous only

    @property
    def inexact_reason(self) -> str | None:
        if self.update_mode == "synchronous":
            return None
        return (
            f"{self.update_mode} updates use stale weights, in an order that differs from run to "
            "run (not deterministic, not equivalent by design)"
        )

    def exact_form(self) -> Self:
        return type(self)()

    @property
    def has_local_optimizer(self) -> bool:
        """Return whether a worker updates its own weights between two fetches, or mixes them."""
        return self.fetch_period_steps > 1 or self.update_mode == "shat"

    @property
    def round_steps(self) -> int:
        return max(self.push_period_steps, self.fetch_period_steps)

    def name_parts(self, placement: Placement) -> Iterator[str]:
        if self.update_mode == "synchronous":
            return
        bound = "" if self.staleness_bound_steps is None else str(self.staleness_bound_steps)
        yield f"{self.update_mode}{bound}"
        if self.round_steps > 1:
            yield f"push{self.push_period_steps}fetch{self.fetch_period_steps}"

    def labels(self) -> Iterator[str]:
        if self.update_mode == "synchronous":
            return
        if self.staleness_bound_steps is not None:
            yield f"{self.update_mode} {self.staleness_bound_steps}"
        else:
            yield self.update_mode
        if self.round_steps > 1:
            yield f"push {self.push_period_steps} fetch {self.fetch_period_steps}"


class ParameterServer(ProcessPerReplica):
    """k processes with one replica and one server each."""

    name = "parameter-server"
    summary = "a process per replica; each serves a shard of the weights to the others"
    position = 70
    implementation = "paceline.train.strategies.parameter_server.strategy:ParameterServerStrategy"
    Keys = ParameterServerKeys
    Options = ParameterServerOptions
    is_candidate_for_best = False
    needs_messages = True
    without_cuda = (
        'local_strategy "parameter-server" updates weights in the memory of CPUs; use '
        'local_strategy = "processes"'
    )

    def faults(self, request: TrialRequest, experiment: Experiment) -> Iterator[str]:
        keys = request.keys(ParameterServerKeys)
        mode = keys.update_mode or "synchronous"
        for name in ("push_period_steps", "fetch_period_steps"):
            if getattr(keys, name) is not None and mode not in _WITH_PERIODS:
                yield (
                    f'{name}: "{mode}" pushes and fetches in every step; remove it, or use '
                    'update_mode = "asynchronous" or "shat"'
                )
        if keys.staleness_bound_steps is not None and mode != "stale-synchronous":
            yield (
                f'staleness_bound_steps: "{mode}" has no bound; remove it, or use update_mode = '
                '"stale-synchronous"'
            )
        instead = 'local_strategy = "processes"'
        yield from without_all_reduce(request, f'"{self.name}"', instead)

    def options(
        self, request: TrialRequest, counts: NodeCounts, replica_batch: int, transport: str
    ) -> ParameterServerOptions:
        keys = request.keys(ParameterServerKeys)
        bound = keys.staleness_bound_steps
        if bound is None and keys.update_mode == "stale-synchronous":
            bound = DEFAULT_STALENESS_BOUND_STEPS
        return ParameterServerOptions(
            update_mode=keys.update_mode or "synchronous",
            push_period_steps=keys.push_period_steps or 1,
            fetch_period_steps=keys.fetch_period_steps or 1,
            staleness_bound_steps=bound,
        )

    def reduction(self, transport: str, options: Any) -> StepReduction:
        return StepReduction(shards="all nodes", updates="by part")
