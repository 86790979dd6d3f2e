"""Derive a model's facts from the model itself, on torch's meta device: no memory, no arithmetic.

Run as a program, `python -m paceline.workloads.facts MODULE:CLASS` prints the facts as JSON.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.spec.model_facts import CLASSES, ModelFacts
from paceline.workloads.build import on_meta_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


def derive_facts(model: str) -> ModelFacts:
    """Return the facts of a model with `CLASSES` classes; `model` as in `model_class`."""
    built = on_meta_device(model, CLASSES, dropout=True)
    parameters = list(built.parameters())
    return ModelFacts(
        parameters=sum(p.numel() for p in parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        split_points=tuple(legal_split_points(built.layers())),
    )


def legal_split_points(layers: Sequence[tuple[str, nn.Module]]) -> list[int]:
    """Return the indexes of the layers at which a pipeline stage may begin.

    A stage cannot begin at a layer that works in place: it would overwrite what it received, and
    splitting after it costs the same.
    """
    return [i for i in range(1, len(layers)) if not getattr(layers[i][1], "inplace", False)]


if __name__ == "__main__":
    print(derive_facts(sys.argv[1]).model_dump_json())
