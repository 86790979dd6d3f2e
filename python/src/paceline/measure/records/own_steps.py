"""Records of the ranks of `paceline verify`: `own_steps.json`, `observed.json` and `resumed.json`.

The ranks are checked against each other by what each did by itself (`own_steps`): no rank waits for
another one while it writes. A tensor is a sketch: numbers that are linear in it, so that the sketch
of a mean of ranks is the mean of their sketches. With the reference they are compared where the
tensors are (`observed`): each rank reads those of the reference and keeps numbers.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

# Forms of parallelism that change gradients.
COMPRESSED = "gradients are compressed by a hook of DDP"
UNEVEN = "ranks may have different numbers of batches (join)"
DIVIDED = "layers are divided among ranks (tensor parallel)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A tensor, or a part of one, in few numbers."""

    numbers: str  # base64 of little-endian float32
    l2: float  # -1: not finite
    crc32: int  # of all its bytes
    low: bool = False  # it has 16 bits
    total: float | None = None  # sum of its elements; None: not finite, or not known


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """Which part of which tensor: `part` of `parts` equal ranges of its elements."""

    name: str
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A weight, or a buffer."""

    place: TensorPart
    shape: list[int]
    value: Sketch
    is_used: bool = True  # no: running statistics that the module only updates
    is_of_model: bool = True  # no: a buffer of a module without parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPass:
    """A rank's own gradient of one tensor in one backward pass."""

    number: int  # of the backward pass
    fresh: bool  # there was no gradient before
    first: Sketch  # as autograd computed it
    last: Sketch | None = None  # after hooks of the script, where they changed it


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGradient:
    """A rank's own gradients of one tensor, or of one part of it, since the last step."""

    place: TensorPart
    passes: list[OwnPass]
    hooks: int = 0  # of the script

    @property
    def current(self) -> list[OwnPass]:
        """Return the passes since there was no gradient."""
        fresh = [place for place, each in enumerate(self.passes) if each.fresh]
        return self.passes[fresh[-1] if fresh else 0 :]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedGradient:
    """The gradient with which an optimiser steps."""

    place: TensorPart
    value: Sketch
    after: Sketch | None = None  # after the step, where it differs
    before_clip: Sketch | None = None  # before it was clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachedRows:
    """Rows of a model's input that a backward pass reached."""

    number: int  # of the pass
    call: int  # in the order of calls
    module: str
    checksums: list[str]
    feeds: bool = False  # the call has samples of its own, each of several numbers
    continues: bool = False  # the call has results of other ones, or parameters, alone


def fed_rows(calls: Sequence[ReachedRows]) -> list[ReachedRows]:
    """Return the calls without those that continue others with as many rows.

    The parts of a model may be called one by one, each with what the one before has made.
    """
    fed = {len(each.checksums) for each in calls if each.feeds}
    return [each for each in calls if not (each.continues and len(each.checksums) in fed)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """A term of a loss: where many numbers become one."""

    number: int  # of the backward pass
    kind: str  # of the node of autograd's graph
    elements: float  # that it takes the mean or sum of; weights of elements count as such
    is_mean: bool | None  # None: neither mean nor sum
    is_linear: bool  # the loss is a constant times the term, plus others
    gradient: float  # that arrives at it
    leaves_out: bool = False  # it counts some elements less than others
    numbers: float = 0.0  # that it sums, each counted once; 0: as `elements`


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPass:
    number: int
    site: str  # file and line
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of an optimiser."""

    names: list[str]
    options: dict[str, float | str]


@dataclass(slots=True, kw_only=True)
class OwnStep:
    """One step of one optimiser."""

    step: int
    optimizer: int  # in the order in which they were made
    weights: list[State] = field(default_factory=list)  # before the step
    buffers: list[State] = field(default_factory=list)  # at the first call of their module
    own: list[OwnGradient] = field(default_factory=list)
    used: list[UsedGradient] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    rows: list[ReachedRows] = field(default_factory=list)
    terms: list[LossTerm] = field(default_factory=list)
    passes: list[BackwardPass] = field(default_factory=list)
    scale: float = 1.0  # of the loss, by a gradient scaler
    gathered: list[str] = field(default_factory=list)  # collectives that lost a gradient
    crossed: list[str] = field(default_factory=list)  # functions that exchange values in a forward
    mixes_rows: bool = False  # the loss has a product of rows of this rank with each other
    moments: list[State] = field(default_factory=list)  # of the optimiser, before its first step
    # weights that the step before has moved, and that are again what they were before it
    lost: list[str] = field(default_factory=list)
    keeps_weights: bool = False  # they are what the step before has left
    clipped_scale: float = 1.0  # of gradients when they were clipped
    has_messages: bool = False  # ranks sent tensors to single other ones since the step before


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterWeights:
    """Weights and groups after one of the later steps. steps: that the first optimiser took."""

    steps: int
    weights: list[State]
    groups: list[Group] = field(default_factory=list)  # of all optimisers


@dataclass(slots=True, kw_only=True)
class OwnSteps:
    """Everything that one rank did by itself."""

    steps: list[OwnStep] = field(default_factory=list)
    after: list[State] = field(default_factory=list)  # weights before the step that follows
    later: list[LaterWeights] = field(default_factory=list)
    # checksum of a few numbers of each weight, before each step that is not recorded
    marks: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # steps of each optimiser
    optimizers: list[str] = field(default_factory=list)  # their classes
    layout: list[str] = field(default_factory=list)  # forms of parallelism, as above
    # modules that exchange values with other ranks while they are called, with a gradient; of the
    # outermost one only if it sends rows to ranks (all_to_all)
    exchanging: list[str] = field(default_factory=list)
    # modules that gather rows of all ranks and sum their results in one call, with a gradient
    dividing: list[str] = field(default_factory=list)
    keeps_statistics: bool = False  # a wrapper was told not to send running statistics
    mixing: list[str] = field(default_factory=list)  # modules that mix rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRows:
    """The rows that one rank trained on in each step, by their checksums; see `of`.

    `ranks/<rank>/trained_rows.json`.
    """

    lengths: list[int]  # rows of each step; 0: not known
    checksums: str  # of all steps: base64 of little-endian integers of 64 bits
    is_whole: bool  # the script ended by itself

    @classmethod
    def of(cls, steps: Sequence[Sequence[str]], *, is_whole: bool) -> TrainedRows:
        """steps: hexadecimal checksums."""
        every = np.array([int(row, 16) for rows in steps for row in rows], "<u8")
        return cls(
            lengths=[len(rows) for rows in steps],
            checksums=base64.b64encode(every.tobytes()).decode(),
            is_whole=is_whole,
        )

    @property
    def steps(self) -> list[list[int]]:
        every = np.frombuffer(base64.b64decode(self.checksums), "<u8")
        ends = np.cumsum(self.lengths, dtype=int)
        return [part.tolist() for part in np.split(every, ends)[: len(self.lengths)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTensor:
    """One tensor of a rank, and how it differs from the reference's of the same name."""

    name: str
    l2: float  # L2 norm of the reference's
    difference_l2: float
    # the factor by which the reference's tensor describes this one best (least squares); None where
    # the reference is zero
    factor: float | None = None
    crc32: int | None = None  # None: ranks are not compared by it, or have parts of the tensor
    # of a change: the part of the difference at elements whose gradient is nothing but roundings
    noise_l2: float = 0.0

    def times(self, scale: float) -> ComparedTensor:
        """Return how `scale` times this rank's tensor differs from the reference's."""
        if scale == 1:
            return self
        factor, square = self.factor or 0.0, self.l2**2
        own_square = self.difference_l2**2 + (2 * factor - 1) * square
        difference_square = scale**2 * own_square + (1 - 2 * scale * factor) * square
        return replace(
            self,
            difference_l2=math.sqrt(max(0.0, difference_square)),
            factor=None if self.factor is None else scale * factor,
        )


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
    # random numbers were drawn between the output of the last module and its gradient
    drew: bool = False
    # checksums of the states of generators of random numbers that the script has used
    generators: dict[str, str] = field(default_factory=dict)
    # weights that something else has moved since the step before, compared with those of the
    # reference after that step
    begin: list[ComparedTensor] = field(default_factory=list)
    inputs: list[list[float]] = field(default_factory=list)  # some numbers of each row, unchanged
    # outputs of modules that could not be compared row by row
    has_unknown_rows: bool = False
    kind: str = ""  # class of the optimiser
    options: list[dict[str, float | str]] = field(default_factory=list)  # of its groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """Output of one module, and the gradient of the output, in numbers for each sample."""

    step: int
    name: str
    kind: str  # class of the module
    samples: list[str]
    forward: list[list[float]]  # L2 norm, and a projection on a fixed direction
    backward: list[list[float]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfTensor:
    """Places of a tensor of the reference that a rank has, in one dimension."""

    name: str
    start: int
    end: int
    size: int  # of all ranks


@dataclass(slots=True, kw_only=True)
class Observed:
    """Everything that one rank observed."""

    initial: list[ComparedTensor] = field(default_factory=list)  # weights before the first step
    updates: list[Update] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    tied: list[list[str]] = field(default_factory=list)  # names of one parameter
    # names that the reference does not have, or with another shape
    unknown: list[str] = field(default_factory=list)
    parts: list[PartOfTensor] = field(default_factory=list)  # that the script divides by hand
    low_precision: bool = False  # a module computed in bf16 or fp16


# --- `--resume-with`: each of three trainings writes `resumed.json`, which are compared afterwards

# Number of elements, then sums over fixed random signs: linear, and equal for equal tensors.
SignedSums = tuple[float, ...]
SumsByName = dict[str, SignedSums]  # by the name of a tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRecord:
    """State of a training before one step of one optimiser. Empty where it was not recorded."""

    weights: SumsByName = field(default_factory=dict)
    gradient: SumsByName = field(default_factory=dict)
    moments: SumsByName = field(default_factory=dict)  # state of the optimiser
    copies: SumsByName = field(default_factory=dict)  # modules that nothing trains: averages
    buffers: SumsByName = field(default_factory=dict)  # before the first module of the step


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
    total: SignedSums  # sum over the weights
    state: StateRecord


@dataclass(slots=True, kw_only=True)
class ResumedRank:
    """Everything that one rank recorded."""

    steps: list[ResumedStep] = field(default_factory=list)
    # steps of each optimiser before the last change of the checkpoint; None: there is none
    saved_after: list[int] | None = None
    was_stopped: bool = False  # by Paceline
    saved_while_stopping: bool = False
