"""Record what this rank does by itself in the first steps, for `paceline verify`.

Nothing is exchanged between ranks for it. The record has the rank's own gradients, the gradients
that optimisers use, weights, buffers, rows of the model's input, and the terms of losses. After the
last of these steps only weights are kept, of few steps; or, where the end of the training is to be
compared, too, all of this of the last steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.algorithms.join import Join
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.base.torch_internals import is_traced
from paceline.collectives.recorder import Recorder
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RankFiles
from paceline.measure.records.own_steps import (
    COMPRESSED,
    DIVIDED,
    UNEVEN,
    BackwardPass,
    LaterWeights,
    LossTerm,
    OwnStep,
    OwnSteps,
    ReachedRows,
    Sketch,
)
from paceline.plan.trials.trial import Observation
from paceline.train.rank.script.loss_terms import (
    LossTerms,
    Product,
    is_not_linear_in,
    loses_gradient,
    products,
    takes_numbers,
)
from paceline.train.rank.script.modules import CalledModules
from paceline.train.rank.script.own_gradients import OwnGradients, place_of, sketch, take
from paceline.train.rank.script.own_states import States, local, name_of
from paceline.train.rank.script.phases import (
    around_steps,
    first_loss,
    has_closure,
    has_messages,
    replaced,
)
from paceline.train.rank.script.reached_rows import ReachedRowsRecorder
from paceline.train.rank.script.tensors import Checksums

_MOST_ROWS = 1024
_KEPT_PASSES = 64
# Modules of torch's hooks for DDP that change gradients, and hooks in them that do not.
_LOSSY = ("powerSGD", "quantization", "default_hooks", "post_localSGD")
_EXACT = {"allreduce_hook"}
_ROUTES = ("all_to_all", "all_to_all_single")
_SYNC_BATCH_NORM = "torch.nn.modules._functions"  # normalises as one process would


class OwnStepsRecorder:
    """Records the first and the last steps of each optimiser while `observing` is active."""

    def __init__(
        self,
        observe: Observation,
        own: RankFiles,
        ranks: int,
        rows: ReachedRowsRecorder,
        operations: Recorder,
        checksums: Checksums,
    ) -> None:
        """checksums: of what the recorder before this one has seen of the same moment."""
        self._operations = operations
        self._most, self._last = observe.steps, observe.last
        self._file, self._ranks = own.own_steps, ranks
        self._reached_rows = rows
        self._found = OwnSteps()
        self._modules = CalledModules()
        self._gradients = OwnGradients()
        self._noted_terms = LossTerms()
        self._checksums = checksums
        self._states = States(self._modules, checksums)
        self._optimizers: list[Optimizer] = []
        self._counts: list[int] = []
        self._stepping = 0  # depth of optimisers that call others
        self._passing = 0  # depth of backward passes
        self._rows: list[ReachedRows] = []
        self._passes: list[BackwardPass] = []
        self._terms: list[LossTerm] = []
        self._clipped: dict[int, Sketch] = {}  # before that, by id of the parameter
        self._gathered: list[Tensor] = []
        self._summed: set[Any] = set()  # nodes of autograd of tensors that were summed over ranks
        self._lost: list[str] = []
        self._crossed: set[str] = set()
        self._crossing: list[Any] = []  # nodes of functions that exchange values, not looked at yet
        self._exchanging: list[nn.Module] = []
        self._routing: list[nn.Module] = []
        self._gathering: list[nn.Module] = []
        self._dividing: list[nn.Module] = []
        self._products: list[Product] = []
        self._scale = 1.0
        self._scale_of_loss = 1.0
        self._is_scaled = False  # gradients, by a gradient scaler, until it divides them
        self._clipped_scale = 1.0
        # checksums of weights before and after the last step, by optimiser
        self._around: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
        self._step: OwnStep | None = None
        self._is_over = False  # the steps of which everything is recorded
        self._hooks = ExitStack()

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Record while the context is active, and write the record at its end."""
        with ExitStack() as stack:
            stack.callback(self._write)
            stack.enter_context(around_steps(self._before_step, self._after_step))
            forget = self._checksums.forget  # they keep gradients, which the script may free
            stack.enter_context(around_steps(forget, forget))
            self._enter(stack.enter_context(self._hooks))
            yield

    def _enter(self, stack: ExitStack) -> None:
        stack.callback(self._gradients.stop)
        self._reached_rows.on_reached = self._reached
        stack.callback(setattr, self._reached_rows, "on_reached", lambda _rows: None)
        stack.enter_context(self._modules.noting())
        for owner, name, answer in (
            (torch.autograd, "backward", self._backward),
            (torch.nn.utils, "clip_grad_norm_", self._clip),
            (torch.nn.utils, "clip_grad_value_", self._clip),
            (Optimizer, "add_param_group", self._add_group),
            (torch.amp.GradScaler, "step", self._scaled_step),
            (torch.amp.GradScaler, "scale", self._scale_loss),
            (torch.amp.GradScaler, "unscale_", self._unscale),
            (dist, "all_gather", self._gather),
            (dist, "all_gather_into_tensor", self._gather),
            (dist, "all_reduce", self._sum),
            (dist, "reduce_scatter_tensor", self._exchange),
            *((dist, name, self._route) for name in _ROUTES),
            (DistributedDataParallel, "register_comm_hook", self._hook),
            (Join, "__enter__", self._join),
        ):
            stack.enter_context(replaced(owner, name, answer))
        for handle in (
            register_module_parameter_registration_hook(self._registered),
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
        ):
            stack.callback(handle.remove)

    def _write(self) -> None:
        self._checksums.forget()  # a step may have been broken off
        if self._reached_rows.has_ended and self._counts:
            self._note_later()
            if self._last:
                self._found.after = self._states.weights(self._optimizers)
        exchanging = self._states.names_of(self._exchanging)
        parts = {name for name in exchanging if name and not name.endswith(".")}
        self._found.exchanging = sorted(parts | self._states.names_of(self._routing))
        self._found.dividing = sorted(self._states.names_of(self._dividing))
        self._found.counts = self._counts
        self._found.optimizers = [type(each).__name__ for each in self._optimizers]
        write_json(self._file, self._found)

    # --- parameters, optimisers, wrappers ---

    def _registered(self, _module: nn.Module, _name: str, parameter: Any) -> None:
        if isinstance(parameter, Tensor):
            self._gradients.follow(parameter)

    def _add_group(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        self._number(arguments[0])
        for parameter in _parameters([arguments[0]]):
            self._gradients.follow(parameter)
        return result

    def _number(self, optimizer: Optimizer) -> int:
        for number, each in enumerate(self._optimizers):
            if each is optimizer:
                return number
        self._optimizers.append(optimizer)
        self._counts.append(0)
        return len(self._optimizers) - 1

    def _hook(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        hook = arguments[2] if len(arguments) > 2 else named.get("hook")
        module, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
        is_torch = module.startswith("torch.distributed.algorithms")
        if is_torch and any(each in module for each in _LOSSY) and name not in _EXACT:
            self._note_layout(COMPRESSED)
        return function(*arguments, **named)

    def _join(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if getattr(arguments[0], "_enable", True):
            self._note_layout(UNEVEN)
        return function(*arguments, **named)

    def _note_layout(self, what: str) -> None:
        if what not in self._found.layout:
            self._found.layout.append(what)

    # --- forward passes ---

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if not (is_traced() or self._passing):
            self._states.called(module, self._reached_rows.call)
            if isinstance(module, DistributedDataParallel) and not module.broadcast_buffers:
                self._found.keeps_statistics = True

    def _after_forward(self, module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if is_traced() or self._passing:
            return
        for parameter in module.parameters(recurse=False):
            self._gradients.follow(parameter)

    def _reached(self, rows: ReachedRows) -> None:
        """Note the rows of a call, once for each backward pass that reaches it."""
        number = self._gradients.number
        if not any(each.number == number and each.call == rows.call for each in self._rows):
            kept = rows.checksums[:_MOST_ROWS]
            self._rows.append(replace(rows, number=number, checksums=kept))

    def _exchange(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._note_exchange(self._exchanging)
        return function(*arguments, **named)

    def _route(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._note_exchange(self._routing)
        return function(*arguments, **named)

    def _note_exchange(self, *kinds: list[nn.Module]) -> bool:
        """Note an exchange of a forward pass that has a gradient, and the module of which it is.

        Return whether it is one.
        """
        if self._passing or (crossing := _differentiated()) is None:
            return False
        self._crossing.append(crossing)
        module = self._reached_rows.innermost
        for modules in kinds:
            if module is not None and not _has(modules, module):
                modules.append(module)
        return True

    def _sum(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Note a tensor with a gradient that a forward pass sums in place, over all ranks."""
        tensor = arguments[0] if arguments else named.get("tensor")
        is_forward = torch.is_grad_enabled() and not self._passing and _caller() != "torch"
        if is_forward and isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            group = named.get("group", arguments[2] if len(arguments) > 2 else None)
            if dist.get_world_size(group) == self._ranks:
                self._summed.add(tensor.grad_fn)
        if self._note_exchange(self._exchanging):
            around = [each for each in self._reached_rows.calls if _has(self._gathering, each)]
            self._dividing += [each for each in around if not _has(self._dividing, each)]
        return function(*arguments, **named)

    def _gather(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._note_exchange(self._exchanging, self._gathering)
        result = function(*arguments, **named)
        is_forward = torch.is_grad_enabled() and not self._passing
        if is_forward and arguments and _caller() != "torch":  # FSDP gathers parameters with it
            into = arguments[0]
            parts = list(into) if isinstance(into, list | tuple) else list(into.chunk(self._ranks))
            if all(each.is_floating_point() and each.numel() > 1 for each in parts):
                self._gathered += parts
        return result

    # --- backward passes ---

    def _backward(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if not self._passing:
            first = first_loss(arguments, named)
            self._modules.is_stage |= has_messages(self._operations)
            models = list(self._states.models().values())
            self._gradients.before_pass(models, self._states.flat())
            self._begin_pass(first)
        self._passing += 1
        try:
            return function(*arguments, **named)
        finally:
            self._passing -= 1

    def _begin_pass(self, loss: Tensor | None) -> None:
        number = self._gradients.number
        self._clipped = {}
        value = None
        if loss is not None and loss.grad_fn is not None and loss.numel() == 1:
            value = float(loss.detach())
            self._noted_terms.follow(loss, number)
            self._products += products(loss, number)
            kept = [each for each in self._gathered if each.untyped_storage().size()]
            if kept and loses_gradient(loss, kept, self._ranks):
                self._lost.append("all_gather")
            if self._summed and is_not_linear_in(loss, self._summed):
                self._lost.append("all_reduce")
        self._gathered, self._summed = [], set()
        self._look_at_crossing(loss)
        self._passes.append(BackwardPass(number=number, site=_site(), loss=value))
        del self._passes[:-_KEPT_PASSES], self._rows[: -4 * _KEPT_PASSES]

    def _look_at_crossing(self, loss: Tensor | None = None) -> None:
        """Note functions that take rows of other ranks, before a backward pass or a step ends.

        One that takes numbers of ranks, such as the mean of their losses, takes no rows: the
        gradients of the terms below it say what it makes of them, if the loss is linear in it.
        """
        rest = []
        for node in self._crossing:
            if takes_numbers(node) and (loss is None or not is_not_linear_in(loss, [node])):
                rest.append(node)  # a later loss may not be linear in it
            else:
                self._crossed.add(type(node).__name__.removesuffix("Backward"))
        self._crossing = rest

    def _clip(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        parameters = arguments[0] if arguments else named.pop("parameters")
        kept = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._is_scaled:
            self._clipped_scale = self._scale_of_loss
        for each in kept:
            if each.grad is not None:
                self._clipped.setdefault(id(each), sketch(local(each.grad)))
        return function(kept, *arguments[1:], **named)

    def _scaled_step(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._scale = float(arguments[0].get_scale())
        try:
            return function(*arguments, **named)
        finally:
            self._scale = 1.0

    def _scale_loss(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        scaler = arguments[0]
        if scaler.is_enabled():
            self._is_scaled, self._scale_of_loss = True, float(scaler.get_scale())
        return function(*arguments, **named)

    def _unscale(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self._is_scaled = False
        return function(*arguments, **named)

    # --- steps ---

    def _before_step(self, optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        self._stepping += 1
        if self._stepping > 1:
            return
        number = self._number(optimizer)
        step = self._counts[number]
        if not number:
            self._note_later()
        if not self._last and (self._is_over or step >= self._most):
            if not self._found.after:
                self._found.after = self._states.weights(self._optimizers)
            if not number:
                self._found.marks.append(self._states.mark())
            self._step = None
            return
        self._step = OwnStep(step=step, optimizer=number, scale=self._scale)
        self._step.weights = self._states.weights(self._optimizers)
        self._step.used = self._states.used(optimizer, self._clipped)
        if not step:
            self._step.moments = self._states.moments(optimizer)
        self._step.has_messages = has_messages(self._operations)
        self._compare_with_former(self._step, optimizer)

    def _compare_with_former(self, step: OwnStep, optimizer: Optimizer) -> None:
        """Note what became of weights since the step before; keep the checksums before this one."""
        now = self._states.checksums(optimizer)
        before, after = self._around.get(step.optimizer, ({}, {}))
        self._around[step.optimizer] = now, {}
        # a model that is first called within a step has no names before it
        step.lost = [n for n, each in now.items() if before.get(n) == each != after.get(n, each)]
        step.keeps_weights = now == after

    def _after_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        self._stepping = max(0, self._stepping - 1)
        if self._stepping:
            return
        number = self._number(optimizer)
        self._counts[number] += 1
        if self._step is not None:
            self._end(self._step, optimizer, arguments, named)
            self._around[number] = self._around[number][0], self._states.checksums(optimizer)
        self._step = None
        if self._found.after:
            self._hooks.close()
            self._is_over = True

    def _note_later(self) -> None:
        """Note weights of few later steps, before the next one: a script may send some."""
        steps = self._counts[0]
        if steps > self._most and _is_looked_at(steps):
            weights = self._states.weights(self._optimizers)
            names = self._states.names(self._optimizers)
            groups = [g for each in self._optimizers for g in self._states.groups(each, names)]
            later = LaterWeights(steps=steps, weights=weights, groups=groups)
            self._found.later.append(later)

    def _end(self, step: OwnStep, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        closure = has_closure(arguments, named)
        own_step = not getattr(type(optimizer).step, "__module__", "").startswith("torch.optim")
        if closure or own_step:
            step.used = self._states.used_after(step.used, optimizer, self._clipped)
        names = self._states.names(self._optimizers)
        theirs = {id(p) for p in _parameters([optimizer])}
        others = {id(p) for p in _parameters(self._optimizers)} - theirs
        for leaf in self._gradients.leaves.values():
            if leaf.is_sharded:
                self._note_layout(DIVIDED)
            if not any(id(owner) in others for owner in leaf.owners):
                name = name_of(leaf, names)
                step.own += [] if name is None else take(leaf, name)
        numbers = {each.number for own in step.own for each in own.current}
        numbers = numbers or {self._gradients.number}  # gradients that ranks have in parts
        self._terms += self._noted_terms.take()
        step.terms = [each for each in self._terms if each.number in numbers]
        rows = [each for each in self._rows if each.number in numbers]
        step.rows = sorted(rows, key=lambda each: each.call)
        step.passes = [each for each in self._passes if each.number in numbers]
        del self._terms[: -64 * _KEPT_PASSES]
        step.clipped_scale, self._clipped_scale, self._is_scaled = self._clipped_scale, 1.0, False
        step.groups = self._states.groups(optimizer, names)
        step.buffers = self._states.take_buffers()
        step.gathered, self._lost = self._lost, []
        self._look_at_crossing()
        step.crossed, self._crossed, self._crossing = sorted(self._crossed), set(), []
        step.mixes_rows = any(
            product.mixes(len(each.checksums), self._ranks)
            for product in self._products
            for each in step.rows
            if each.number == product.number
        )
        self._products = [each for each in self._products if each.number not in numbers]
        if any(place_of(p) is None for p in _parameters([optimizer])):
            self._note_layout(DIVIDED)
        self._found.mixing = sorted({*self._found.mixing, *self._states.mixing()})
        self._found.steps.append(step)
        same = [each for each in self._found.steps if each.optimizer == step.optimizer]
        if len(same) > self._most + self._last:  # the first ones and the last ones stay
            self._found.steps.remove(same[self._most])


def _has(modules: list[nn.Module], module: nn.Module) -> bool:
    return any(each is module for each in modules)


def _is_looked_at(steps: int) -> bool:
    """Return whether weights are kept after so many steps: 6, 8, 12, 16, 24, 32 …, as they cost."""
    while steps % 2 == 0 and steps > 3:
        steps //= 2
    return steps in (2, 3)


def _parameters(optimizers: list[Optimizer]) -> list[Tensor]:
    return [p for each in optimizers for group in each.param_groups for p in group["params"]]


def _site() -> str:
    """Return the file and line of the user's code from which a backward pass began.

    A library has one line for the passes of all losses. Without code of the user it is that line.
    """
    site = ""
    for frame in _frames():
        package, file = _package(frame), frame.f_code.co_filename
        if package == "paceline" and site:  # which runs the script
            break
        if package not in ("torch", "paceline"):
            is_own = "site-packages" not in file
            if is_own or not site:
                site = f"{file}:{frame.f_lineno}"
            if is_own:
                break
    return site


def _differentiated() -> FunctionCtx | None:
    """Return the node of the function of autograd whose forward part calls; None without one."""
    for frame in _frames():
        if frame.f_code.co_name == "forward" and frame.f_code.co_argcount:
            own = frame.f_locals.get(frame.f_code.co_varnames[0])
            is_ours = frame.f_globals.get("__name__") != _SYNC_BATCH_NORM
            if (
                isinstance(own, FunctionCtx)
                and is_ours
                and any(getattr(own, "needs_input_grad", ()))
            ):
                return own
    return None


def _caller() -> str:
    """Return the package that called a function that this one replaces."""
    return next((p for frame in _frames() if (p := _package(frame)) != "paceline"), "")


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
