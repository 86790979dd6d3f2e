"""Interface of a training task: everything about a training that its author decides.

A task is a subclass of `Task`. Only `model` must be written; the other methods have defaults, which
describe the classification of images. Every local strategy trains the same task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.base.errors import UsageError
from paceline.base.torch_internals import children_of
from paceline.plan.spec.values import MemoryFormat, Target
from paceline.plan.trials.sample_order import SampleRandom
from paceline.train.data.batches import Augment, is_image, mirror_at_random
from paceline.train.training.graph_blocks import Blocks, graph_blocks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from paceline.plan.spec.values import MemoryFormat
    from paceline.train.data.items import MapStyleDataset


NamedParameters = list[tuple[str, nn.Parameter]]
Sums = tuple[Tensor, Tensor]  # sum and count of a metric


class TaskOptions(BaseModel):
    """Options of a task: subclass it, and name the subclass in `Task.Options`."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Values of the spec and facts of the data set that a task may use."""

    classes: int = 0  # number of classes of the target; 0 if it is not known
    image_size: int = 224  # side of an input image, pixels
    learning_rate: float = 0.001  # after warm-up
    learning_rate_warmup_steps: int = 0  # TaskOptimizer applies it; tasks need not
    momentum: float = 0.9
    dropout: bool = True
    seed: int = 1
    samples: int = 0  # that a synthetic `dataset()` should have; 0 if it is not known
    steps: int = 1  # optimiser steps of the whole training
    memory_format: MemoryFormat = "contiguous"
    # of a stored input; None: an RGB image of image_size
    input_shape: tuple[int, ...] | None = None
    input_dtype: str = "uint8"
    accumulation_steps: int | None = None  # of the spec; None: as the task says
    options: Mapping[str, Any] = field(default_factory=dict)  # `options` of the workload


class Task:
    """A training task. Attributes: `settings` (TaskSettings), `options` (an instance of
    `Options`)."""

    Options: ClassVar[type[TaskOptions]] = TaskOptions
    # Fields of the data set, which are columns of its Parquet files; they may be the same one.
    input_field: str = "image"
    target_field: str = "label"
    # Parts into which a worker divides its samples of a step, to need less memory, unless the spec
    # says it. The micro-batches of a pipeline have the same effect, so pipelines ignore it.
    accumulation_steps: int = 1
    # Limit of the global L2 norm of the gradient of all parameters; None means no limit.
    clip_norm: float | None = None
    # Quality to reach in evaluations, unless the spec has a target.
    target: Target | None = None
    # Shell patterns of parameters that keep the weights of `model`, for example of a new head.
    new_parameters: tuple[str, ...] = ()

    def __init__(self, settings: TaskSettings) -> None:
        """Raises pydantic's ValidationError for options that are not allowed."""
        self.settings = settings
        self.options: Any = self.Options.model_validate(dict(settings.options))
        if settings.accumulation_steps is not None:
            self.accumulation_steps = settings.accumulation_steps

    def model(self) -> nn.Module:
        """Return the model with its initial weights, float32.

        Draw them from torch's default generator, as the layers of torch.nn do: it is seeded with
        the seed of the spec. Planning calls this on torch's meta device.
        """
        raise NotImplementedError(f"{type(self).__name__} must define model()")

    def dataset(self) -> MapStyleDataset | None:
        """Return a map-style data set (torch.utils.data.Dataset) of (input, target) pairs.

        The pairs contain arrays, tensors or numbers. An index must always give the same pair, on
        every host; random transforms belong to `augment`. It is used where the spec names no data
        set. Default: None, the fields of the data set that the spec names.
        """
        return None

    def held_out_dataset(self, place: str) -> MapStyleDataset:
        """Return the samples of the spec's `held_out_data`, with a task whose `dataset` has those
        to train on. place: absolute path or URL.
        """
        raise UsageError(
            f"{type(self).__name__}: expected held_out_dataset(place) for held_out_data = "
            f'"{place}"; define it, or use held_out_samples'
        )

    def pretrained(self) -> str | Path | None:
        """Return a file with initial weights by the model's names; None: those of `model`.

        It is a safetensors file, or a file of torch.save that contains tensors only. Every node
        reads it. Names and shapes must be those of the model, except for `new_parameters`.
        """
        return None

    def blocks(self, model: nn.Module) -> Blocks:
        """Return the model as a sequence of named modules: calling them in turn is its forward.

        Pipelines are split between blocks. A block consists of layers of the model, and has the
        name of its layer. The default flattens nested nn.Sequential modules. Of another model, it
        finds the places between which a single tensor is alive, with torch.fx. Raises UsageError
        if there is none.
        """
        if type(model) is nn.Sequential:
            return list(_flattened(model))
        try:
            return graph_blocks(model, self.example_input())
        except UsageError as error:
            raise UsageError(
                f"{type(self).__name__}: a pipeline cannot split it: {error}"
            ) from None

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, shape (samples,). Default: cross entropy."""
        return cross_entropy(outputs, targets, reduction="none")

    def evaluate(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor | Sums]:
        """Return the metrics of an evaluation by name, for the samples of one batch.

        Each is a tensor of shape (samples,), whose mean over all samples counts, or a pair (sum,
        count) of tensors of equal shape: the metric is then the mean over their elements of the
        total sum over the total count (mean intersection over union, for example). Default: `loss`,
        and `accuracy` (top-1) if outputs are one row of scores per sample and targets are classes.
        """
        metrics: dict[str, Tensor | Sums] = {"loss": self.loss(outputs, targets)}
        if outputs.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point():
            metrics["accuracy"] = outputs.argmax(1) == targets
        return metrics

    def optimizer(self, parameters: NamedParameters) -> Optimizer:
        """Return an optimiser from torch.optim. Default: SGD with the momentum of the spec.

        Most strategies divide parameters among workers: `parameters` may contain consecutive
        elements of a parameter as a vector, under the parameter's name. So the update of an element
        must depend only on its own gradient and state. Choose parameter groups by name, not by
        shape.
        """
        values = self.settings
        return torch.optim.SGD(
            parameters, lr=values.learning_rate, momentum=values.momentum, fused=True
        )

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:  # noqa: ARG002
        """Return a scheduler of the learning rate, which is stepped once after each optimiser step.

        Default: None, a constant learning rate.
        """
        return None

    def augment(self, sample: NDArray[Any], random: SampleRandom) -> NDArray[Any]:
        """Return a sample's input, transformed at random; same shape and type.

        random: the same numbers for a sample and epoch on every rank. Default: half of the images
        (uint8, shape (height, width, 3)) are mirrored left to right; others stay unchanged.
        """
        return mirror_at_random(sample, random) if is_image(sample.shape, sample.dtype) else sample

    def augment_target(self, target: NDArray[Any], random: SampleRandom) -> NDArray[Any]:  # noqa: ARG002
        """Return a sample's target, transformed like its input; same shape and type.

        random: of the sample and epoch, as in `augment`. Some pipeline stages have targets without
        inputs, so both are transformed apart, by equal random numbers. Default: unchanged.
        """
        return target

    def to_input(self, samples: NDArray[Any]) -> Tensor:
        """Return the model's input for the stored inputs of some samples.

        samples: shape (n, ...). Default: uint8 RGB images of shape (n, height, width, 3) become
        float32 of shape (n, 3, height, width), normalised with the mean and standard deviation of
        ImageNet. Other floating-point numbers become float32, and integers int64.
        """
        if is_image(samples.shape[1:], samples.dtype):
            return to_input(samples, self.settings.memory_format)
        values = torch.from_numpy(samples)
        return values.float() if samples.dtype.kind == "f" else values.long()

    def example_input(self) -> Tensor:
        """Return an input of one sample, whose values have no meaning."""
        side = self.settings.image_size
        shape = self.settings.input_shape or (side, side, 3)
        return self.to_input(np.zeros((1, *shape), dtype=self.settings.input_dtype))

    def empty_input(self, samples: NDArray[Any]) -> Tensor:
        """Allocate the result of `to_input(samples)`."""
        if self._converts_images(samples):
            return empty_input(samples, self.settings.memory_format)
        first = self.to_input(samples[:1]) if len(samples) else self.example_input()
        return first.new_empty((len(samples), *first.shape[1:]))

    def fill_input(self, samples: NDArray[Any], out: Tensor) -> None:
        """Write `to_input(samples)` to `out`; the default conversion needs no further copy."""
        if self._converts_images(samples):
            to_input(samples, self.settings.memory_format, out=out)
        else:
            out.copy_(self.to_input(samples))

    def transform_of(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Augment | None:
        """Return `augment` if it may change stored inputs of this shape and type, else None."""
        is_default = type(self).augment is Task.augment
        return None if is_default and not is_image(shape, dtype) else self.augment

    def target_transform(self) -> Augment | None:
        """Return `augment_target` if the task defines it, else None."""
        is_default = type(self).augment_target is Task.augment_target
        return None if is_default else self.augment_target

    def _converts_images(self, samples: NDArray[Any]) -> bool:
        is_default = type(self).to_input is Task.to_input
        return is_default and is_image(samples.shape[1:], samples.dtype)


def _flattened(model: nn.Sequential, prefix: str = "") -> Iterable[tuple[str, nn.Module]]:
    for name, block in children_of(model).items():
        if block is None:
            continue
        if type(block) is nn.Sequential:
            yield from _flattened(block, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", block


# --- convert images to model inputs: uint8 rows of pixels to normalised float32 tensors ----------

# Means and standard deviations of ImageNet's RGB channels, as torchvision's weights expect them.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def torch_memory_format(name: MemoryFormat) -> torch.memory_format:
    return _FORMATS[name]


def put_in_memory_format(model: nn.Module, name: MemoryFormat) -> None:
    """Convert the weights of the model's convolutions to that memory format."""
    model.to(memory_format=_FORMATS[name])  # type: ignore[call-overload]  # torch's stub lacks it


def empty_input(images: NDArray[np.uint8], memory_format: MemoryFormat) -> Tensor:
    """Allocate the result of `to_input` for these images."""
    samples, height, width, channels = images.shape
    shape = (samples, channels, height, width)
    return torch.empty(shape, memory_format=_FORMATS[memory_format])


def to_input(
    images: NDArray[np.uint8], memory_format: MemoryFormat, out: Tensor | None = None
) -> Tensor:
    """Return (images / 255 - MEAN) / STD as float32.

    images: shape (n, height, width, 3), RGB. Returns shape (n, 3, height, width) in
    `memory_format`; for channels_last the order of the bytes stays the same. out: a tensor of that
    shape to fill and return.
    """
    scaled = empty_input(images, memory_format) if out is None else out
    scaled.copy_(torch.from_numpy(images).permute(0, 3, 1, 2))
    scale, offset = _channel_constants()
    return torch.addcmul(offset, scaled, scale, out=scaled)


def _channel_constants() -> tuple[Tensor, Tensor]:
    """Return scale and offset per channel, shape (1, 3, 1, 1): one multiply-add per pixel."""
    std = torch.tensor(STD, dtype=torch.float64)
    mean = torch.tensor(MEAN, dtype=torch.float64)
    scale, offset = 1 / (255 * std), -mean / std
    return scale.float().view(1, 3, 1, 1), offset.float().view(1, 3, 1, 1)
