"""Predict the peak memory of a trial's ranks: `python -m paceline.rank.memory_question < QUESTION`.

The question is JSON: {"trial": ..., "batches": [...]}. The answer is a list with the memory for
each global batch. The command side asks in a process of its own, because it must not import torch.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.errors import PacelineError, UsageError
from paceline.host.garbage import permanent_objects
from paceline.host.memory import own_memory
from paceline.node.memory import SoloNode
from paceline.plan.trial import Trial
from paceline.training.resources import keep_freed_memory

if TYPE_CHECKING:
    from paceline.rank.samples import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Peak memory of the ranks of one node, in bytes, without pages of files."""

    global_batch: int
    ranks: list[int]  # private memory of each rank
    shared: int  # memory that the ranks share: weights, buffers, samples

    @property
    def total(self) -> int:
        return sum(self.ranks) + self.shared


def predict(trial: Trial, batches: list[int], base_bytes: int) -> list[Predicted]:
    """Predict for each global batch. base_bytes: of an interpreter with its libraries.

    Raises UsageError if the strategy of the trial has no memory model.
    """
    return [_predicted(trial, batch, base_bytes) for batch in batches]


def _predicted(trial: Trial, batch: int, base_bytes: int) -> Predicted:
    import torch  # noqa: PLC0415  (after the base was measured)

    from paceline.rank.samples import open_samples  # noqa: PLC0415
    from paceline.spec.extensions import STRATEGIES, load_object  # noqa: PLC0415
    from paceline.training.step_memory import FakeModel  # noqa: PLC0415
    from paceline.workloads.build import on_meta_device  # noqa: PLC0415

    training = trial.training.model_copy(update={"global_batch": batch})
    trial = trial.model_copy(update={"training": training})
    descriptor = STRATEGIES.get(trial.local_strategy)
    path = descriptor.implementation_for(trial.transport, trial.strategy_options)
    model = load_object(path).memory_model
    if not model:
        raise UsageError(f'local_strategy "{trial.local_strategy}" has no memory model')
    with open_samples(training, None, SoloNode()) as samples:
        values = samples.source.targets
        targets = torch.from_numpy(np.zeros((1, *values.shape), values.dtype))
        fake = FakeModel(samples.task, on_meta_device(samples.task), targets, trial)
        node = load_object(model)(fake)
        return Predicted(
            global_batch=batch,
            ranks=[base_bytes + rank for rank in node.ranks],
            shared=node.shared + _samples_bytes(samples, trial),
        )


def _samples_bytes(samples: Samples, trial: Trial) -> int:
    """Return the bytes of the decoded samples of a node."""
    if trial.training.reading != "memory":
        return 0  # two shuffle windows, which do not depend on the batch
    source = samples.source
    used = len(samples.order.used_sample_ids())
    return int(used * (source.inputs.nbytes + source.targets.nbytes))


def main() -> None:
    question = json.load(sys.stdin)
    try:
        trial = Trial.model_validate(question["trial"])
        keep_freed_memory()  # as a rank does before it imports its libraries
        with permanent_objects():
            import paceline.rank.train  # noqa: F401, PLC0415  (the libraries of a rank)

            if trial.training.items is None:
                import petastorm  # noqa: F401, PLC0415  (reads data sets; with pandas 33 MiB)
        base_bytes = own_memory().peak_private_bytes
        found = predict(trial, question["batches"], base_bytes)
    except PacelineError as error:
        sys.exit(str(error))
    json.dump([asdict(each) for each in found], sys.stdout)


if __name__ == "__main__":
    main()
