"""Facts of a model that planning needs, derived from the model itself.

The model needs torch, which takes one to two seconds and 200 MB to import. Commands that only plan,
and the runner beside the trainings, must not carry that. So a short-lived process derives the
facts, once per model, and only where a rule needs them. A table of facts would be faster, but a
second home for what the model's code says, and third-party models would need one as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

from pydantic import BaseModel, ConfigDict

from paceline.base.errors import EnvironmentLacks, TimedOut
from paceline.base.host.programs import why_it_failed
from paceline.plan.spec.values import Target

# Classes for which facts hold; a data set with fewer classes has slightly fewer parameters.
CLASSES = 1000
_TIMEOUT_S = 120.0


class ModelFacts(BaseModel):
    """Sizes are for `CLASSES` classes and fp32."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: int
    parameter_bytes: int
    split_points: tuple[int, ...]  # layers at which a pipeline stage may begin, ascending
    batch_norms: tuple[str, ...] = ()  # layers with batch statistics
    # those that cannot normalise a single sample, because it has one value for each channel
    batch_norms_of_several: tuple[str, ...] = ()
    optimizer: str = "SGD"  # class name
    clip_norm: float | None = None  # of the task
    # (first, last) layer of those that share a trained parameter
    tied_layers: tuple[tuple[int, int], ...] = ()
    target: Target | None = None  # of the task
    input_field: str = "image"
    target_field: str = "label"
    items: int | None = None  # samples of the task's own map-style data set
    unused_parameter: str | None = None  # one that gets no gradient from the model's output
    # why a pipeline cannot split the model, and why workers cannot update shards of parameters
    splitting_fault: str | None = None
    sharding_fault: str | None = None
    loss_fault: str | None = None  # why its loss cannot be used; None also if it is not known


@cache
def model_facts(
    implementation: str, options: str = "{}", data: str = "", samples: int = 0
) -> ModelFacts:
    """Return the facts of the model of a task; takes 1 to 2 s at the first call.

    implementation: "module:Class" or "file.py:Class". options: those of the task, as JSON.
    data: path or URL of its data set, which shows what an input is; "" or a missing one: not known.
    samples: in the task's own data set, if that is synthetic; used where `data` is "".

    Raises EnvironmentLacks if the model cannot be built, TimedOut if that takes over 120 s.
    """
    command = [sys.executable, "-m", "paceline.train.workloads", implementation, options, data]
    command.append(str(samples))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimedOut(
            f"model {implementation}: expected its facts within {_TIMEOUT_S:.0f} s, got none; "
            "is the machine overloaded?"
        ) from None
    if done.returncode != 0:
        raise EnvironmentLacks(
            f"model {implementation}: expected a model that can be built, got: "
            f"{why_it_failed(done)}"
        )
    return ModelFacts.model_validate_json(done.stdout)
