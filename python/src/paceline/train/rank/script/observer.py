"""Observe a script's training for `paceline verify`: samples, gradients, weights, modules.

Every optimiser is followed. The reference keeps its tensors as files; all others compare theirs
with them at once, rank by rank, and keep numbers. Sharded tensors (DTensor, flat parameters of
FSDP 1) are put together first.
A reference that is trained once more with outputs that differ by roundings shows how much roundings
matter for each tensor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from paceline.base.torch_internals import DataLoaderIterator, is_traced
from paceline.base.torch_internals.fsdp import FlatParameter
from paceline.collectives.recorder import Recorder
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RankFiles, TrialFiles
from paceline.measure.records.own_steps import (
    ComparedTensor,
    ModuleCall,
    Observed,
    PartOfTensor,
    Update,
)
from paceline.measure.records.phases import MOST_DIFFERENCE, NOISE_SHARE
from paceline.plan.trials.trial import Observation, RankContext
from paceline.train.rank.script.batches import (
    checksums,
    places_in,
    rows_of,
    samples_of,
    tensors_in,
)
from paceline.train.rank.script.modules import (
    CalledModules,
    flat_parameters,
    named_buffers,
    named_parameters,
    parameter_names,
    without_wrappers,
)
from paceline.train.rank.script.own_states import options_of
from paceline.train.rank.script.phases import (
    around_steps,
    first_loss,
    has_closure,
    has_messages,
    hooked,
    replaced,
)
from paceline.train.rank.script.resume_state import generators
from paceline.train.rank.script.tensors import (
    Checksums,
    DividedPart,
    gradient_of,
    parts_of,
    whole,
    whole_of,
)
from paceline.train.training.tensors import save_tensors

# Relative change of the outputs of a first module: 16 units of roundoff of fp32, and one of the
# types with less precision.
_CHANGE = {torch.float32: 2.0**-20, torch.float64: 2.0**-20}
_CHANGE_LOW_PRECISION = 2.0**-8
_LOW_PRECISION = {torch.bfloat16, torch.float16}
# Share of the largest gradient of a tensor below which that of an element is nothing but roundings.
# The second: if modules computed with less precision.
_NOISE, _NOISE_LOW_PRECISION = 2.0**-16, 2.0**-6
# Options of optimisers that choose among implementations of the same step.
_IMPLEMENTATIONS = {"foreach", "fused", "capturable", "differentiable"}
# Of the inputs of a step.
_KEPT_ROWS, _KEPT_NUMBERS = 256, 16
# Elements that are compared at once: what is computed of them stays in a core's cache.
_PART = 2**16


class Observer:
    """Observes what happens in this process while `observing` is active."""

    def __init__(
        self,
        observation: Observation,
        context: RankContext,
        files: TrialFiles,
        own: RankFiles,
        operations: Recorder,
        checksums: Checksums,
    ) -> None:
        """checksums: known while a step begins, or while it ends."""
        self._observation = observation
        self._checksums = checksums
        self._keeps = observation.reference is None
        self._reference = TrialFiles(files.root.parent / (observation.reference or files.root.name))
        self._own = own
        self._operations = operations
        self._random = torch.Generator().manual_seed(1)
        self._found = Observed()
        self._modules = CalledModules()
        self._models: dict[str, nn.Module] = {}
        self._names: dict[int, list[str]] = {}
        self._flat: list[FlatParameter] = []
        self._parts: dict[str, DividedPart] = {}  # of tensors that the script divides among ranks
        self._optimizers: list[Optimizer] = []
        self._steps: list[int] = []  # of each optimiser
        self._before: dict[str, Tensor] = {}  # weights before the step that is under way
        self._copies: dict[int, dict[str, Tensor]] = {}  # their memory, by optimiser: new is slow
        self._gradient: list[ComparedTensor] | None = None  # of the step that is under way
        self._is_apart = False  # see `_are_apart`: no tensor is compared from then on
        self._rounding: dict[str, Tensor] = {}  # elements of it that are nothing but roundings
        self._batch: list[str] | None = None  # checksums of the samples of the last batch
        self._batch_tensors: list[Tensor] = []  # of that batch, with a row for each sample
        self._samples: list[str] = []  # of all batches since the last step
        self._calling: list[nn.Module] = []  # modules whose forward pass is under way
        self._part: list[str] | None = None  # samples of an outermost call with a part of the batch
        self._covered: dict[int, int] = {}  # samples of the batch that a module has had in parts
        self._inputs: list[list[float]] = []  # of the first outermost call of the step
        self._has_unknown_rows = False  # of the outputs of this step
        self._after: dict[int, dict[str, int]] = {}  # checksums of weights after steps
        self._begin: list[ComparedTensor] = []
        self._losses: list[float] = []
        self._calls: list[tuple[int, nn.Module, list[str], list[list[float]], list[Any]]] = []
        self._is_rounding = observation.rounded  # the next output of a module
        self._clipped_unix_s: float | None = None
        self._unused: dict[str, str] = {}  # states of generators before the script
        self._generators: dict[str, str] = {}  # their states after the last module
        self._drew = False  # random numbers after it, in this step
        self._context = context
        self._hooks = ExitStack()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe while the context is active, and write what was seen at its end."""
        with ExitStack() as stack:
            stack.callback(self._write)
            self._unused = generators()
            stack.enter_context(around_steps(self._before_step, self._after_step))
            self._enter(stack.enter_context(self._hooks))
            yield

    def _enter(self, stack: ExitStack) -> None:
        stack.enter_context(self._modules.noting())
        stack.enter_context(replaced(DataLoaderIterator, "__next__", self._next_batch))
        stack.enter_context(replaced(torch.autograd, "backward", self._backward))
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            stack.enter_context(replaced(torch.nn.utils, name, self._clip))
        hooks = hooked(
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
        )
        stack.enter_context(hooks)

    # --- samples, losses, clipping ---

    def _next_batch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        batch = function(*arguments)
        self._take(batch)
        return batch

    def _take(self, batch: Any) -> None:
        self._batch, self._batch_tensors = checksums(batch), samples_of(batch)
        self._samples += self._batch or []
        self._covered = {}

    def _backward(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        first = first_loss(arguments, named)
        if first is not None and first.numel() == 1:
            self._losses.append(float(first.detach()))
        if self._generators:
            self._drew |= self._generators != generators()
            self._generators = {}
        result = function(*arguments, **named)
        self._is_rounding = self._observation.rounded
        return result

    def _clip(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._clipped_unix_s = time.time()
        return function(*arguments, **named)

    # --- modules ---

    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if is_traced():
            return
        is_received = self._batch is None and self._is_received(inputs)
        if self._batch is None and not is_received:
            self._take(inputs)
        if not self._calling:
            self._part = self._part_of_batch(module, inputs)
            is_model = next(module.parameters(), None) is not None and torch.is_grad_enabled()
            if is_model and not self._inputs and not is_received:
                self._inputs = _numbers_of(inputs)
        self._calling.append(module)

    def _is_received(self, inputs: tuple[Any, ...]) -> bool:
        """Return whether a module gets what another rank has computed, as a stage does."""
        needs_gradient = any(each.requires_grad for each in tensors_in(inputs))
        return needs_gradient and has_messages(self._operations, ["recv"])

    def _part_of_batch(self, module: nn.Module, inputs: tuple[Any, ...]) -> list[str] | None:
        """Return the samples of a call that has a part of the batch: by its rows, or the next ones.

        None if it has the whole batch. A stage that gets no batch itself has them by their places.
        """
        rows = rows_of(inputs)
        if not rows or (self._batch is not None and rows >= len(self._batch)):
            return None
        begin = self._covered.get(id(module), 0)
        if self._batch is None:
            self._covered[id(module)] = begin + rows
            return [f"#{place}" for place in range(begin, begin + rows)]
        if places := places_in(self._batch_tensors, inputs):
            return [self._batch[place] for place in places]
        if begin + rows > len(self._batch):
            begin = 0
        self._covered[id(module)] = begin + rows
        return self._batch[begin : begin + rows]

    def _after_forward(self, module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        """Note the numbers of a module's output; return another output where it is rounded."""
        if is_traced():
            return None
        while self._calling and self._calling.pop() is not module:
            pass  # its forward pass has failed
        first = outputs if isinstance(outputs, Tensor) else next(tensors_in(outputs), None)
        if first is None or isinstance(first, DTensor) or not first.is_floating_point():
            return None
        changed = None
        if self._is_rounding and first is outputs:
            self._is_rounding = False
            changed = first = self._rounded(first)
        if first.dtype in _LOW_PRECISION:
            self._found.low_precision = True
        samples = self._part or self._batch
        if _is_layer(module) and samples and not self._is_apart:
            numbers = per_sample(first, len(samples))
            if numbers is not None:
                gradient: list[Any] = []
                step = max(self._steps, default=0)
                self._calls.append((step, module, samples, numbers, gradient))
                self._generators = generators()
                if first.requires_grad:
                    note = partial(_note_gradient, gradient, len(samples))
                    first.register_hook(note)  # type: ignore[no-untyped-call]
            elif first.dim() and first.requires_grad:
                self._has_unknown_rows = True
        return changed

    def _rounded(self, tensor: Tensor) -> Tensor:
        change = _CHANGE.get(tensor.dtype, _CHANGE_LOW_PRECISION)
        noise = torch.randn(tensor.shape, generator=self._random).to(tensor)
        return tensor * (1 + change * noise)

    # --- optimisers ---

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        self._checksums.forget()
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            self._steps.append(0)
            self._modules.is_stage |= has_messages(self._operations)
            self._models = self._modules.models()
            self._names = parameter_names(self._models)
            self._flat = flat_parameters(self._models)
        number = self._optimizers.index(optimizer)
        if self._steps[number] >= self._observation.steps:
            self._copies.pop(number, None)
            if not number:  # the steps that are compared are over
                self._hooks.close()
            return
        is_first = not self._steps[number]
        self._begin, self._before, self._gradient = [], {}, None
        weights = self._weights(optimizer) if is_first or not self._is_apart else {}
        if is_first:
            theirs = self._reference_at(f"initial-{number}", weights)
            ranks = self._context.world_size
            self._parts |= {} if self._keeps else parts_of(weights, theirs, ranks)
            self._found.initial += self._compared(weights, theirs, hashed=False)
        if self._is_apart:
            return
        self._begin = self._moved_before(number, weights)
        self._before = self._copied(number, weights)
        if not has_closure(arguments, named):
            self._compare_gradients(optimizer, number)

    def _copied(self, number: int, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies = self._copies.setdefault(number, {})
        for name, tensor in weights.items():
            if name not in copies or copies[name].shape != tensor.shape:
                copies[name] = torch.empty_like(tensor)
            copies[name].copy_(tensor)
        return {name: copies[name] for name in weights}

    def _moved_before(self, number: int, weights: Mapping[str, Tensor]) -> list[ComparedTensor]:
        """Compare weights that something else has moved since the step before, as a broadcast does.

        They are compared with those of the reference after that step.
        """
        after = self._after.pop(number, {})
        if self._keeps and not self._context.is_first:
            return []  # the first rank may be writing them
        moved = [
            name
            for name, each in weights.items()
            if after and after.get(name, 0) != self._checksums.of(each)
        ]
        path = self._reference.weights_at(f"observed-weights-{number}-{self._steps[number] - 1}")
        if not moved or not path.exists():
            return []
        theirs = load_file(path)
        pairs = [(n, weights[n], self._part_of(n, theirs[n])) for n in moved if n in theirs]
        return [compared(n, own, other) for n, own, other in pairs if own.shape == other.shape]

    def _after_step(self, optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        self._checksums.forget()
        number = self._optimizers.index(optimizer)
        if self._steps[number] >= self._observation.steps:
            return
        if self._gradient is None and not self._is_apart:
            self._compare_gradients(optimizer, number)
        step = self._steps[number]
        moved, change = ([], []) if self._is_apart else self._compared_weights(optimizer, number)
        # An optimiser may exchange gradients itself, inside its step.
        are_apart = _are_apart(self._gradient or [], step) and _are_apart(change, step)
        self._is_apart |= are_apart and not self._sharded()
        reduced = [each.arrived_unix_s for each in self._operations.ended()]
        clipped = self._clipped_unix_s
        self._found.updates.append(
            Update(
                step=step,
                optimizer=number,
                samples=self._samples or None,
                losses=self._losses,
                gradient=self._gradient or [],
                weights=moved,
                change=change,
                clipped=clipped is not None and max(reduced, default=0.0) > clipped,
                drew=self._drew,
                generators=dict(generators().items() - self._unused.items()),
                begin=self._begin,
                inputs=self._inputs,
                has_unknown_rows=self._has_unknown_rows,
                kind=type(optimizer).__name__,
                options=_options(optimizer),
            )
        )
        self._steps[number] += 1
        self._batch, self._batch_tensors, self._samples, self._losses = None, [], [], []
        self._clipped_unix_s, self._drew = None, False
        self._part, self._covered, self._calling = None, {}, []
        self._inputs, self._has_unknown_rows = [], False
        self._before, self._gradient, self._rounding = {}, None, {}

    def _compared_weights(
        self, optimizer: Optimizer, number: int
    ) -> tuple[list[ComparedTensor], list[ComparedTensor]]:
        """Compare weights and float buffers after a step, and how far it has moved the weights."""
        place = f"{number}-{self._steps[number]}"
        weights = self._weights(optimizer)
        self._after[number] = {name: self._checksums.of(each) for name, each in weights.items()}
        every = {**weights, **self._float_buffers()}
        moved = {name: weights[name] for name in self._before}
        change = {n: t - self._before[n] for n, t in moved.items()} if self._keeps else {}
        changes = self._reference_at(f"change-{place}", change)
        return (
            self._compared(every, self._reference_at(f"weights-{place}", every)),
            self._compared(moved, changes, hashed=False, before=self._before),
        )

    def _parameters(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return named_parameters([optimizer], self._names)

    def _weights(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return whole_of(self._parameters(optimizer), self._flat, Tensor.detach)

    def _compare_gradients(self, optimizer: Optimizer, number: int) -> None:
        """Compare the gradients now: an optimiser may change them."""
        found = whole_of(self._parameters(optimizer), self._flat, gradient_of)
        point = f"gradient-{number}-{self._steps[number]}"
        theirs = self._reference_at(point, found)
        self._gradient = self._compared(found, theirs)
        self._rounding = {} if self._keeps else self._noise(found, theirs)

    def _float_buffers(self) -> dict[str, Tensor]:
        buffers = named_buffers(self._models)
        return {n: whole(b) for n, b in buffers.items() if b.is_floating_point()}

    # --- comparison ---

    def _noise(
        self, gradient: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return which elements of gradients are nothing but roundings, here and in the reference.

        Optimisers as Adam, which divide by the size of the gradient, move them by any amount.
        """
        share = _NOISE_LOW_PRECISION if self._found.low_precision else _NOISE
        return {
            name: noise
            for name, ours in gradient.items()
            if name in theirs
            and (noise := _rounding(ours, self._part_of(name, theirs[name]), share)) is not None
        }

    def _part_of(self, name: str, whole: Tensor) -> Tensor:
        """Return what this rank has of a tensor of the reference."""
        part = self._parts.get(name)
        return whole if part is None else part.of(whole)

    def _reference_at(self, point: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the reference's tensors at a point of the training: those given, or its file's.

        The reference itself keeps them.
        """
        path = self._reference.weights_at(f"observed-{point}")
        if not self._keeps:
            return load_file(path) if path.exists() else {}
        if self._context.is_first:
            save_tensors(path, tensors)
        return tensors

    def _compared(
        self,
        tensors: Mapping[str, Tensor],
        theirs: Mapping[str, Tensor],
        *,
        hashed: bool = True,
        before: Mapping[str, Tensor] | None = None,
    ) -> list[ComparedTensor]:
        """Compare tensors with the reference's.

        hashed: whether the checksums of ranks are compared with each other. before: what is
        subtracted from them first; differences that are only roundings are then counted apart.
        """
        sharded = self._sharded()
        hashed = hashed and self._context.world_size > 1
        noise = {} if before is None else self._rounding
        found = []
        for name, ours in tensors.items():
            reference = self._part_of(name, theirs[name]) if name in theirs else None
            if reference is None or reference.shape != ours.shape:
                if name not in self._found.unknown:
                    self._found.unknown.append(name)
                continue
            is_hashed = hashed and name not in sharded and name not in self._parts
            found.append(
                compared(
                    name,
                    ours,
                    reference,
                    crc32=self._checksums.of(ours) if is_hashed else None,
                    before=None if before is None else before[name],
                    noise=noise.get(name),
                )
            )
        return found

    def _sharded(self) -> set[str]:
        every = {**named_parameters(self._optimizers, self._names), **named_buffers(self._models)}
        names = {name for name, tensor in every.items() if isinstance(tensor, DTensor)}
        return names.union(*(each.names for each in self._flat))

    def _write(self) -> None:
        names: dict[int, str] = {}
        for prefix, model in self._models.items():
            for name, module in model.named_modules():
                full = prefix + without_wrappers(name)
                names.setdefault(id(module), full.removesuffix("."))
        self._found.calls = [
            ModuleCall(
                step=step,
                name=names[id(module)],
                kind=type(module).__name__,
                samples=samples,
                forward=forward,
                backward=backward[0] if backward else None,
            )
            for step, module, samples, forward, backward in self._calls
            if id(module) in names
        ]
        self._found.parts = [
            PartOfTensor(name=name, start=p.start, end=p.start + p.length, size=p.size)
            for name, p in sorted(self._parts.items())
        ]
        self._found.tied = [each for each in self._names.values() if len(each) > 1]
        write_json(self._own.observed, self._found)


def per_sample(tensor: Tensor, samples: int) -> list[list[float]] | None:
    """Return the L2 norm of each sample and its projection on a fixed direction.

    None if the first dimension does not divide into the samples.
    """
    if not tensor.dim() or len(tensor) % samples or not tensor.numel():
        return None
    rows = tensor.detach().reshape(samples, -1).to("cpu", torch.float32)
    direction = torch.cos(torch.arange(rows.shape[1], dtype=torch.float32))
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return torch.stack([norms, (rows @ direction).double()], dim=1).tolist()


def _numbers_of(inputs: tuple[Any, ...]) -> list[list[float]]:
    """Return some numbers of each of the first rows of a module's inputs; empty: not known."""
    tensors = [each for each in samples_of(inputs) if each.is_floating_point() and each.dim() > 1]
    if not tensors:
        return []
    rows = tensors[0].detach()[:_KEPT_ROWS].flatten(1)
    if not bool(rows.isfinite().all()):
        return []
    places = torch.linspace(0, rows.shape[1] - 1, min(_KEPT_NUMBERS, rows.shape[1])).long()
    found: list[list[float]] = rows[:, places.to(rows.device)].double().tolist()
    return found


def _note_gradient(found: list[Any], samples: int, gradient: Tensor) -> None:
    if not isinstance(gradient, DTensor):
        found.append(per_sample(gradient, samples))


def _is_layer(module: nn.Module) -> bool:
    """Return whether a module computes something itself: it has parameters or no parts."""
    own = next(module.parameters(recurse=False), None)
    return own is not None or next(module.children(), None) is None


def _options(optimizer: Optimizer) -> list[dict[str, float | str]]:
    """Return the options of each group that its class defines, and that change what is computed."""
    kept = getattr(optimizer, "defaults", {}).keys() - _IMPLEMENTATIONS  # some wrappers have none
    found = map(options_of, optimizer.param_groups)
    return [{name: value for name, value in each.items() if name in kept} for each in found]


def _are_apart(tensors: Sequence[ComparedTensor], step: int) -> bool:
    """Return whether gradients or changes differ by more than any limit allows, as those of other
    samples do.

    The judgement of the whole training ends with this step then, whatever follows.
    """
    whole = math.hypot(*(each.l2 for each in tensors))
    limit = MOST_DIFFERENCE * (step + 1)
    return any(each.difference_l2 > limit * (each.l2 + NOISE_SHARE * whole) for each in tensors)


def compared(
    name: str,
    ours: Tensor,
    reference: Tensor,
    *,
    crc32: int | None = None,
    before: Tensor | None = None,
    noise: Tensor | None = None,
) -> ComparedTensor:
    """Compare a tensor, whose checksum may be known, with the reference's on the CPU.

    before: subtracted from ours. noise: elements whose difference is also told apart.
    """
    theirs_2 = difference_2 = product = noise_2 = 0.0
    kind = torch.promote_types(torch.promote_types(ours.dtype, reference.dtype), torch.float32)
    flat = [ours.detach().reshape(-1), reference.reshape(-1)]
    flat += [each.reshape(-1) for each in (before, noise) if each is not None]
    for a, b, *more in zip(*(torch.split(each, _PART) for each in flat), strict=True):
        own, theirs = a.to(kind), b.to(kind)
        if before is not None:
            own = own - more.pop(0).to(kind)
        theirs_2 += float(torch.dot(theirs, theirs))
        product += float(torch.dot(own, theirs))
        difference = own - theirs
        difference_2 += float(torch.dot(difference, difference))
        if more:
            apart = difference * more[0]
            noise_2 += float(torch.dot(apart, apart))
    return ComparedTensor(
        name=name,
        l2=_finite(math.sqrt(theirs_2)),
        difference_l2=_finite(math.sqrt(difference_2)),
        factor=_finite(product) / theirs_2 if theirs_2 else None,
        crc32=crc32,
        noise_l2=_finite(math.sqrt(noise_2)),
    )


def _rounding(ours: Tensor, theirs: Tensor, share: float) -> Tensor | None:
    """Return which elements of two gradients are below `share` of the largest one, but not zero.

    None if there are none, or if the gradients have not the same shape.
    """
    if ours.shape != theirs.shape or not theirs.numel():
        return None
    own, other = ours.detach().reshape(-1), theirs.reshape(-1)
    limit = share * float(torch.linalg.vector_norm(other, float("inf")))
    found = torch.empty(own.shape, dtype=torch.bool)
    for into, a, b in zip(*(torch.split(each, _PART) for each in (found, own, other)), strict=True):
        size = torch.maximum(a.to(b).abs(), b.abs())
        torch.logical_and(size > 0, size <= limit, out=into)
    return found if bool(found.any()) else None


def _finite(number: float) -> float:
    return number if math.isfinite(number) else math.inf
