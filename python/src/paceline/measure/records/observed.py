"""Observations of a rank of `paceline verify`, `ranks/<rank>/observed.json`.

Tensors are compared where they are: each rank reads those of the reference and keeps numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTensor:
    """One tensor of a rank, and how it differs from the reference's of the same name."""

    name: str
    l2: float  # L2 norm of the reference's
    difference_l2: float
    # the factor by which the reference's tensor describes this one best (least squares); None where
    # the reference is zero
    factor: float | None = None
    sha256: str | None = None  # None: ranks are not compared by it, or have parts of the tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One step of one optimiser."""

    step: int
    optimizer: int  # in the order in which they stepped first
    samples: list[str] | None  # checksum of each sample of this rank; None: there is no batch
    losses: list[float]  # of each backward pass
    gradient: list[ComparedTensor]
    weights: list[ComparedTensor]  # after the step, buffers included
    change: list[ComparedTensor]  # by which the step moved the weights
    clipped: bool = False  # gradients were clipped before the last operation between ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """Output of one module, and the gradient of the output, in numbers for each sample."""

    step: int
    name: str
    kind: str  # class of the module
    samples: list[str]
    forward: list[list[float]]  # L2 norm, and a projection on a fixed direction
    backward: list[list[float]] | None = None


@dataclass(slots=True, kw_only=True)
class Observed:
    """Everything that one rank observed."""

    initial: list[ComparedTensor] = field(default_factory=list)  # weights before the first step
    updates: list[Update] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    tied: list[list[str]] = field(default_factory=list)  # names of one parameter
    # names that the reference does not have, or with another shape
    unknown: list[str] = field(default_factory=list)
    low_precision: bool = False  # a module computed in bf16 or fp16
