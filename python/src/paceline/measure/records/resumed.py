"""Records of a rank of `paceline verify --resume-with`, `ranks/<rank>/resumed.json`.

Each of the three trainings writes them; the judge compares the files afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Number of elements, then sums over fixed random signs: linear, and equal for equal tensors.
Sketch = tuple[float, ...]
Sketches = dict[str, Sketch]  # by the name of a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRecord:
    """State of a training before one step of one optimiser. Empty where it was not recorded."""

    weights: Sketches = field(default_factory=dict)
    gradient: Sketches = field(default_factory=dict)
    moments: Sketches = field(default_factory=dict)  # state of the optimiser
    copies: Sketches = field(default_factory=dict)  # modules that no optimiser trains, as averages
    buffers: Sketches = field(default_factory=dict)  # before the first module of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedStep:
    """One step of one optimiser; everything is as the step begins."""

    step: int  # of this optimiser, from 0 in each process
    optimizer: int  # in the order in which they stepped first
    samples: list[str] | None  # checksum of each sample of this rank; None: there is no batch
    losses: list[float]  # of each backward pass
    values: dict[str, float]  # learning rate and other numbers of the groups
    scaler: dict[str, float]  # state of the gradient scaler
    generators: dict[str, str]  # checksum of the state of each random number generator
    total: Sketch  # sum over the weights
    state: StateRecord


@dataclass(slots=True, kw_only=True)
class ResumedRank:
    """Everything that one rank recorded."""

    steps: list[ResumedStep] = field(default_factory=list)
    # steps of each optimiser before the last change of the checkpoint; None: there is none
    saved_after: list[int] | None = None
    was_stopped: bool = False  # by Paceline
    saved_while_stopping: bool = False
