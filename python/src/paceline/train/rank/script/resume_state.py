"""Record the state of a script's training for `paceline verify --resume-with`.

The state is read as each step of an optimiser begins: samples, learning rates, weights, state of
the optimiser, gradient scaler, random number generators. Tensors are kept as sketches. The training
that is to be resumed ends at the first step that begins after a checkpoint was written.
"""

from __future__ import annotations

import gc
import hashlib
import math
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from paceline.base.torch_internals import DataLoaderIterator, is_traced
from paceline.base.torch_internals.fsdp import FlatParameter
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RankFiles
from paceline.measure.records.own_steps import (
    ResumedRank,
    ResumedStep,
    SignedSums,
    StateRecord,
    SumsByName,
)
from paceline.plan.trials.trial import ResumePart
from paceline.train.rank.script.batches import checksums
from paceline.train.rank.script.modules import (
    CalledModules,
    flat_parameters,
    named_buffers,
    named_parameters,
    parameter_names,
)
from paceline.train.rank.script.phases import around_steps, first_loss, hooked, replaced
from paceline.train.rank.script.program import EnoughSteps
from paceline.train.rank.script.tensors import gradient_of, whole, whole_of

_SUMS = 8
# A prime, so that no dimension of a tensor is a multiple of it.
_SIGNS = 65521
_ROWS = 64  # of signs, whose elements are summed at once: a copy in float64 has 32 MiB
_LARGEST = 1e300  # in place of infinity and NaN
_PATH = re.compile(r"[/\\]|\.[A-Za-z]\w*$")


class ResumeRecorder:
    """Records what happens in this process while `recording` is active."""

    def __init__(self, part: ResumePart, own: RankFiles) -> None:
        self._part, self._own = part, own
        self._found = ResumedRank()
        self._modules = CalledModules()
        self._names: dict[int, list[str]] = {}
        self._flat: list[FlatParameter] = []
        self._models: dict[str, nn.Module] = {}
        self._optimizers: list[Optimizer] = []
        self._done: list[int] = []  # steps of each optimiser
        self._copies: dict[str, nn.Module] | None = None
        self._batch: list[str] | None = None
        self._is_new = False  # the batch was not passed backward yet
        self._has_loader = False
        self._samples: list[str] | None = None
        self._losses: list[float] = []
        self._buffers: SumsByName | None = None
        self._scalers: list[torch.amp.GradScaler] = []
        self._watch = None if part.watched is None else CheckpointWatch(part)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the context is active, and write what was seen at its end."""
        with ExitStack() as stack:
            stack.callback(self._write)
            stack.enter_context(self._modules.noting())
            stack.enter_context(replaced(DataLoaderIterator, "__next__", self._next_batch))
            stack.enter_context(replaced(torch.autograd, "backward", self._backward))
            stack.enter_context(replaced(torch.amp.GradScaler, "scale", self._scale))
            hooks = hooked(
                register_module_forward_pre_hook(self._before_forward),
            )
            stack.enter_context(hooks)
            stack.enter_context(around_steps(self._before_step, self._after_step))
            yield

    # --- samples, losses, gradient scaler ---

    def _next_batch(self, function: Callable[..., Any], *arguments: Any) -> Any:
        batch = function(*arguments)
        self._has_loader = True
        self._batch, self._is_new = checksums(batch), True
        return batch

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if is_traced():
            return
        if self._buffers is None:
            owned = named_buffers({"": module})
            self._buffers = {
                name.removeprefix("module."): sketch(whole(buffer))
                for name, buffer in owned.items()
            }
        if not self._has_loader and not self._is_new:
            self._batch, self._is_new = checksums(inputs), True

    def _backward(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        first = first_loss(arguments, named)
        if first is not None and first.numel() == 1:
            self._losses.append(_finite(float(first.detach())))
        if self._is_new and self._batch is not None:
            self._samples = (self._samples or []) + self._batch
        self._is_new = False
        return function(*arguments, **named)

    def _scale(self, function: Callable[..., Any], scaler: Any, *arguments: Any) -> Any:
        if all(scaler is not each for each in self._scalers):
            self._scalers.append(scaler)
        return function(scaler, *arguments)

    # --- optimisers ---

    def _before_step(self, optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        if all(optimizer is not each for each in self._optimizers):
            self._optimizers.append(optimizer)
            self._done.append(0)
            self._models = self._modules.models()
            self._names = parameter_names(self._models)
            self._flat = flat_parameters(self._models)
        number = self._number_of(optimizer)
        if number == 0:
            self._stop_after_checkpoint()
        weights = _sketches(self._whole(optimizer, Tensor.detach))
        is_full = self._done[number] >= self._part.full_from
        self._found.steps.append(
            ResumedStep(
                step=self._done[number],
                optimizer=number,
                samples=self._samples,
                losses=self._losses,
                values=_values(optimizer),
                scaler=self._scaler_state(),
                generators=generators(),
                total=_total(weights),
                state=self._state(optimizer, weights) if is_full else StateRecord(),
            )
        )

    def _after_step(self, optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        number = self._number_of(optimizer)
        self._done[number] += 1
        self._samples, self._losses, self._buffers = None, [], None

    def _number_of(self, optimizer: Optimizer) -> int:
        return next(n for n, each in enumerate(self._optimizers) if each is optimizer)

    def _whole(self, optimizer: Optimizer, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return whole_of(named_parameters([optimizer], self._names), self._flat, of)

    def _state(self, optimizer: Optimizer, weights: SumsByName) -> StateRecord:
        return StateRecord(
            weights=weights,
            gradient=_sketches(self._whole(optimizer, gradient_of)),
            moments=self._moments(optimizer),
            copies=self._copied(),
            buffers=self._buffers or {},
        )

    def _moments(self, optimizer: Optimizer) -> SumsByName:
        """Return the state of each parameter; of a flat one, the part that this rank has."""
        found: SumsByName = {}
        for name, parameter in named_parameters([optimizer], self._names).items():
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    found[f"{name}.{key}"] = sketch(whole(value))
                elif isinstance(value, int | float):
                    found[f"{name}.{key}"] = (1.0, _finite(float(value)))
        return found

    def _copied(self) -> SumsByName:
        """Return the parameters of modules that no optimiser trains, such as averages of weights.

        They are looked for once, among all objects: nothing needs to call them.
        """
        if self._copies is None:
            trained = {id(p) for each in self._optimizers for g in each.param_groups
                       for p in g["params"]}  # fmt: skip
            self._copies = _untrained(trained)
        return {
            f"{prefix}{name}": sketch(whole(parameter.detach()))
            for prefix, module in self._copies.items()
            for name, parameter in module.named_parameters()
        }

    def _scaler_state(self) -> dict[str, float]:
        return {
            f"scaler{number or ''}.{key}": float(value)
            for number, scaler in enumerate(self._scalers)
            for key, value in scaler.state_dict().items()
            if isinstance(value, int | float)
        }

    # --- checkpoint, end ---

    def _stop_after_checkpoint(self) -> None:
        """End the script if a checkpoint was written; all ranks end at the same step."""
        if self._watch is None:
            return
        if self._watch.changed(self._weight_bytes()):
            self._found.saved_after = list(self._done)
        after = self._part.stop_after
        if after is not None and self._done[0] >= after and self._on_any_rank(self._is_saved):
            self._found.was_stopped = True
            raise EnoughSteps

    @property
    def _is_saved(self) -> bool:
        return self._found.saved_after is not None

    def _on_any_rank(self, is_so: bool) -> bool:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return is_so
        device = self._optimizers[0].param_groups[0]["params"][0].device
        flag = torch.tensor(float(is_so), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def _weight_bytes(self) -> int:
        parameters = named_parameters(self._optimizers, self._names).values()
        return sum(p.numel() * p.element_size() for p in parameters)

    def _write(self) -> None:
        if self._watch is not None and self._watch.changed(self._weight_bytes()):
            self._found.saved_while_stopping = self._found.was_stopped
            self._found.saved_after = list(self._done)
        write_json(self._own.resumed, self._found)


class CheckpointWatch:
    """Looks for a checkpoint among the files that a script writes in its folder.

    It is the file that the words for resuming name; if they name none, files that are together at
    least half as large as the weights.
    """

    def __init__(self, part: ResumePart) -> None:
        assert part.watched is not None
        self._folder = Path(part.watched)
        words = [word.partition("=")[2] or word for word in part.words]
        self._named = [word for word in words if _PATH.search(word) and not word.startswith("-")]
        self._first = self._files()
        self._last = self._first

    def changed(self, weight_bytes: int) -> bool:
        """Return whether the checkpoint was written since the last call."""
        files = self._files()
        ours = {path: known for path, known in files.items() if self._first.get(path) != known}
        checkpoint = self._checkpoint(ours, weight_bytes)
        changed = any(self._last.get(path) != files[path] for path in checkpoint)
        if changed:
            self._last = files
        return changed

    def _checkpoint(self, files: Mapping[Path, tuple[int, int]], weight_bytes: int) -> list[Path]:
        named = {(self._folder / each).resolve() for each in self._named}
        found = [path for path in files if path in named]
        if found:
            return found
        found = [p for p in files if not named or not named.isdisjoint(p.parents)]
        return found if sum(files[path][1] for path in found) >= weight_bytes / 2 else []

    def _files(self) -> dict[Path, tuple[int, int]]:
        """Return time and size of each file, but of no compiled module.

        A file may vanish while others are listed.
        """
        found = {}
        for path in self._folder.resolve().rglob("*"):
            if path.parent.name == "__pycache__":
                continue
            try:
                state = path.lstat()
            except FileNotFoundError:
                continue
            if path.is_file():
                found[path] = (state.st_mtime_ns, state.st_size)
        return found


def sketch(tensor: Tensor) -> SignedSums:
    """Return the number of elements, and sums over fixed random signs.

    tensor: on the CPU.
    """
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.detach().reshape(-1)
    sums = torch.zeros(_SIGNS, dtype=torch.float64)
    for part in torch.split(flat, _ROWS * _SIGNS):
        whole_rows = len(part) // _SIGNS * _SIGNS
        sums += part[:whole_rows].reshape(-1, _SIGNS).sum(0, dtype=torch.float64)
        rest = part[whole_rows:]
        sums[: len(rest)] += rest
    folded = torch.nn.functional.pad(sums * _signs(), (0, -_SIGNS % _SUMS)).reshape(-1, _SUMS)
    return (float(flat.numel()), *(_finite(float(each)) for each in folded.sum(0)))


@cache
def _signs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 2, (_SIGNS,), generator=generator).double() * 2 - 1


def _sketches(tensors: Mapping[str, Tensor]) -> SumsByName:
    return {name: sketch(tensor) for name, tensor in tensors.items()}


def _total(sketches: SumsByName) -> SignedSums:
    return tuple(map(sum, zip(*sketches.values(), strict=True)))


def _finite(number: float) -> float:
    return number if math.isfinite(number) else _LARGEST


def _values(optimizer: Optimizer) -> dict[str, float]:
    """Return the numbers of the groups, such as `group0.lr`."""
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            values = value if isinstance(value, tuple) else (value,)
            for place, each in enumerate(values):
                is_number = isinstance(each, int | float) or (
                    isinstance(each, Tensor) and each.numel() == 1
                )
                if is_number:
                    name = f"group{number}.{key}" + (f"[{place}]" if len(values) > 1 else "")
                    found[name] = _finite(float(each))
    return found


def generators() -> dict[str, str]:
    """Return a checksum of the state of each random number generator of the process."""
    states = {"python": repr(random.getstate()).encode()}
    states["torch"] = torch.get_rng_state().numpy().tobytes()
    if "numpy" in sys.modules:
        import numpy as np  # noqa: PLC0415  (only if the script has loaded it)

        _, key, *rest = np.random.get_state(legacy=True)
        states["numpy"] = np.asarray(key).tobytes() + repr(rest).encode()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {
        name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()
    }


def _untrained(trained: set[int]) -> dict[str, nn.Module]:
    """Return the outermost modules whose parameters are all of floats and not in `trained`."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = {id(part) for each in modules for part in each.modules() if part is not each}
    found: dict[str, nn.Module] = {}
    for module in modules:
        own = list(module.parameters())
        if id(module) in inner or not own or any(id(p) in trained for p in own):
            continue
        found[f"{type(module).__name__}#{len(found)}."] = module
    return found
