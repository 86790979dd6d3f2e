"""The rows of a script's training, for `paceline verify`: those that backward passes reach.

A row is known by a checksum of what the outermost module gets of it. They are noted from the first
step to the end of the script, or for some seconds after the steps that are compared: a fault in
their order may show in no single step. Nothing is exchanged between ranks; the first one writes
after which step all of them end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from paceline.base.torch_internals import is_traced
from paceline.measure.records.files import write_json, write_text
from paceline.measure.records.layout import TrialFiles
from paceline.measure.records.own_steps import ReachedRows, TrainedRows, fed_rows
from paceline.plan.trials.trial import Observation
from paceline.train.rank.script.batches import checksums, tensors_in
from paceline.train.rank.script.phases import around_steps, first_loss, hooked, replaced
from paceline.train.rank.script.program import EnoughSteps

_MOST_OUTPUTS = 8
_MOST_ROWS = 2_000_000
# Steps from the one in which the first rank writes the end: another one may be in the next already.
_NOTICE_STEPS = 2


class ReachedRowsRecorder:
    """Notes the rows of this rank, and ends the script.

    observe: after the first steps that are compared, others are followed for their rows alone; the
    script ends by itself if its last steps are compared, too. on_reached: called whenever a
    gradient arrives at an output of a call.
    """

    def __init__(self, observe: Observation, files: TrialFiles, rank: int) -> None:
        self.on_reached: Callable[[ReachedRows], None] = lambda _rows: None
        self.has_ended = False  # the script, by itself
        self._steps, self._rank = observe.steps, rank
        self._ends, self._followed_s = not observe.last, observe.followed_s
        self._file, self._end = files.rank(rank).trained_rows, files.last_step
        self._optimizer: Optimizer | None = None
        self._taken = 0  # steps of the first optimiser
        self._has_begun = False  # to train: a module was called
        self._ends_s: float | None = None
        self._last: int | None = None
        self._stepping = 0  # depth of optimisers that call others
        self._passing = 0  # depth of backward passes
        self._calls: list[nn.Module] = []  # modules that are being called
        self._outermost = 0  # number of the outermost call
        # Modules that go backward in their own forward pass. They are no models: what is called in
        # them is, as a step of the user is that a wrapper of a framework calls.
        self._around: WeakSet[nn.Module] = WeakSet()
        self._model: nn.Module | None = None  # the outermost one that is being called
        self._call = 0  # number of its call
        self._call_rows: list[str] | None = None
        self._kind = (False, False)  # of the outermost call: `feeds` and `continues` of its rows
        self._now: list[ReachedRows] = []  # in the step that is under way
        self._found: list[list[str]] = []
        self._count = 0

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note rows while the context is active, and write them at its end."""
        with ExitStack() as stack:
            stack.callback(self._write)
            stack.enter_context(replaced(torch.autograd, "backward", self._backward))
            hooks = hooked(
                register_module_forward_pre_hook(self._before_forward),
                register_module_forward_hook(self._after_forward, always_call=True),
            )
            stack.enter_context(hooks)
            stack.enter_context(around_steps(self._before_step, self._after_step))
            yield

    @property
    def call(self) -> int:
        """Number of the outermost call that is under way, else of the next one."""
        return self._outermost if self._calls else self._outermost + 1

    @property
    def innermost(self) -> nn.Module | None:
        """The module in whose own forward function the script is."""
        return self._calls[-1] if self._calls else None

    @property
    def calls(self) -> Sequence[nn.Module]:
        """The modules in whose calls the script is, the outermost one first."""
        return self._calls

    def _write(self) -> None:
        is_whole = self.has_ended and self._count < _MOST_ROWS
        write_json(self._file, TrainedRows.of(self._found, is_whole=is_whole))

    # --- passes ---

    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if is_traced() or self._passing:
            return
        self._has_begun = True
        if not self._calls:
            self._model, self._outermost = None, self._outermost + 1
        self._calls.append(module)
        if module in self._around:
            return
        if self._model is None:
            self._model, self._call_rows, self._call = module, None, self._call + 1
        if self._call_rows is None and torch.is_grad_enabled() and _has_parameters(self._model):
            self._call_rows, self._kind = checksums(inputs), _kind(inputs)

    def _after_forward(self, module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if is_traced() or self._passing:
            return
        while self._calls and self._calls.pop() is not module:
            pass
        model = self._model
        if model is None or any(each is model for each in self._calls):
            return
        if module is model and self._call_rows and torch.is_grad_enabled():
            self._follow(tensors_in(outputs), self._call_rows)
        self._model = None

    def _follow(self, outputs: Iterable[Tensor], own: list[str]) -> None:
        """Note its own rows of the call when a gradient arrives at an output."""
        feeds, continues = self._kind
        rows = ReachedRows(
            number=0,
            call=self._call,
            module=type(self._model).__name__,
            checksums=own,
            feeds=feeds,
            continues=continues,
        )

        def arrived(_gradient: Tensor) -> None:
            if all(each is not rows for each in self._now):
                self._now.append(rows)
            self.on_reached(rows)

        with_gradient = [each for each in outputs if each.requires_grad]
        for each in with_gradient[:_MOST_OUTPUTS]:
            each.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _backward(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self._calls and not self._passing:
            self._leave_calls(first_loss(arguments, named))
        self._passing += 1
        self._has_begun = True
        try:
            return function(*arguments, **named)
        finally:
            self._passing -= 1

    def _leave_calls(self, loss: Tensor | None) -> None:
        """Take modules in whose forward pass a backward pass begins for no models.

        Rows of what was called in them were not noted before; they are those of the outermost one.
        """
        self._around.update(self._calls)
        if self._call_rows and loss is not None:
            self._follow([loss], self._call_rows)
        self._model = self._call_rows = None

    # --- steps ---

    def _before_step(self, _optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        self._stepping += 1
        if self._stepping > 1:
            return
        if self._ends and self._taken >= self._steps and self._is_over():
            raise EnoughSteps

    def _is_over(self) -> bool:
        """Return whether all ranks end before this step.

        The first rank writes the end, and so does one that does not know its rows.
        """
        now_s = time.monotonic()
        if self._ends_s is None:
            self._ends_s = now_s + self._followed_s
        if self._last is None and self._end.exists():
            self._last = int(self._end.read_text())
        is_late = not self._rank and now_s >= self._ends_s
        if self._last is None and (is_late or not any(self._found)):
            self._last = len(self._found) + _NOTICE_STEPS
            write_text(self._end, str(self._last))
        return self._last is not None and len(self._found) >= self._last

    def _after_step(self, optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        self._stepping = max(0, self._stepping - 1)
        if self._stepping or not self._has_begun:
            return  # an optimiser makes its state by a step before it restores it
        self._optimizer = self._optimizer or optimizer
        self._taken += optimizer is self._optimizer
        fed = fed_rows(self._now)
        calls = {tuple(each.checksums) for each in fed}  # several passes over the same rows
        rows = [row for each in sorted(calls) for row in each]
        self._now = []
        if self._count < _MOST_ROWS:
            self._found.append(rows)
            self._count += len(rows)


def _kind(inputs: tuple[Any, ...]) -> tuple[bool, bool]:
    own = [each for each in tensors_in(inputs) if not each.requires_grad]
    return any(each.dim() > 1 for each in own), not own


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
