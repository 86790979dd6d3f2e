"""The workloads by name, with the values that hold where a spec is silent.

Model, data-set size, transforms and optimiser of `complex-small` and `simple-big` are those of
Lerat, Mahmoudi, Mahmoudi: Distributed Deep Learning, From Single-Node to Multi-Node Architecture
(2022), sections 3.1 and 3.2. The paper does not give batch sizes; ours are stated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.spec.values import WorkloadName

ModelName = Literal["vgg16", "alexnet", "tiny-alexnet", "tiny-vgg"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadDefaults:
    """A workload's model and its defaults."""

    name: WorkloadName
    model: ModelName
    images: int  # photos of the data set
    image_size: int  # pixels, square
    global_batch: int
    learning_rate: float = 0.001
    momentum: float = 0.9


WORKLOADS: dict[WorkloadName, WorkloadDefaults] = {
    "complex-small": WorkloadDefaults(
        name="complex-small", model="vgg16", images=791, image_size=224, global_batch=16
    ),
    "simple-big": WorkloadDefaults(
        name="simple-big", model="alexnet", images=6003, image_size=224, global_batch=64
    ),
    # 0.01: with 0.001 the few steps of a quickstart would hardly move the loss
    "tiny": WorkloadDefaults(
        name="tiny",
        model="tiny-alexnet",
        images=96,
        image_size=64,
        global_batch=32,
        learning_rate=0.01,
    ),
}
