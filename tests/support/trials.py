"""Make and change trials in tests, whatever extension an option belongs to; places of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.plan.spec.descriptors import OptionModel
from paceline.plan.trials.trial import Placement, RankContext, Training, Trial

_OPTIONS_OF = {
    "local_strategy": "strategy_options",
    "transport": "transport_options",
    "launcher": "launcher_options",
}
_FIELDS = {
    "id": "t", "experiment": "unit", "repeat": 0, "launcher": "local", "transport": "none",
    "local_strategy": "sequential", **{name: {} for name in _OPTIONS_OF.values()},
}  # fmt: skip
_PLACEMENT = {"nodes": 1, "ranks_per_node": 1, "threads_per_rank": 1}
_TRAINING = {
    "workload": "tiny", "model": "tiny-alexnet", "dataset": "none", "seed": 3, "image_size": 32,
    "global_batch": 8, "epochs": 1, "max_steps": None, "warmup_steps": 0, "learning_rate": 0.01,
    "momentum": 0.9, "dropout": True, "reading": "memory", "precision": "fp32",
    "memory_format": "contiguous",
}  # fmt: skip


def tiny_trial(
    placement: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Trial:
    """Return the baseline of `tiny` with other values of its placement, its training or itself."""
    values: dict[str, Any] = {
        **_FIELDS,
        "placement": Placement(**{**_PLACEMENT, **(placement or {})}),
        "training": Training(**{**_TRAINING, **(training or {})}),
        **fields,
    }
    return Trial(**values)


def changed(trial: Trial, **changes: Any) -> Trial:
    """Return the trial with other fields or options.

    A key of Trial replaces the field; another key is an option of the strategy, the transport or
    the launcher. An extension that is replaced by another gets its default options.
    """
    rows = trial.model_dump()
    for key, options in _OPTIONS_OF.items():
        if changes.get(key, rows[key]) != rows[key]:
            del rows[options]
    fields = {key: value for key, value in changes.items() if key in Trial.model_fields}
    found = Trial.model_validate(rows | fields)
    options = {key: value for key, value in changes.items() if key not in fields}
    updates = {name: _with(getattr(found, name), options) for name in _OPTIONS_OF.values()}
    assert not options, f"no extension of the trial has {', '.join(options)}"
    return found.model_copy(update=updates)


def _with(model: OptionModel, options: dict[str, Any]) -> OptionModel:
    """Return the model with those of the options that it has; they are taken out of `options`."""
    own = {key: options.pop(key) for key in list(options) if key in type(model).model_fields}
    return type(model).model_validate(model.model_dump() | own)


def placement(ranks: int, threads: int, **others: Any) -> Placement:
    """Return the placement of ranks on one node; threads: of each. others: further fields."""
    return Placement(nodes=1, ranks_per_node=ranks, threads_per_rank=threads, **others)


def rank_context(rank: int = 0, ranks: int = 1, **others: Any) -> RankContext:
    """Return the place of one of the ranks of a node; others: fields with other values."""
    usual = {
        "rank": rank, "world_size": ranks, "local_rank": rank, "ranks_on_node": ranks,
        "node_index": 0, "host": "alpha", "process_started_unix_s": 1000.0,
    }  # fmt: skip
    return RankContext(**{**usual, **others})
