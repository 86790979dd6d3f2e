"""Facts of a planned trial that tables and comparisons need.

The extensions know their own options; only this module of the analysis asks a trial for them.
"""

from __future__ import annotations

from collections.abc import Hashable

from paceline.plan.trials.trial import Trial

TIMES, DOT = "\N{MULTIPLICATION SIGN}", "\N{MIDDLE DOT}"


def node_setup(trial: Trial) -> Hashable:
    """Identify what a node does, independent of the launcher and of what connects the nodes."""
    place = trial.placement
    return (
        trial.local_strategy,
        place.replicas_per_node,
        place.stages,
        place.threads_per_worker,
        trial.layout,
        tuple(trial.strategy_options.details()) if place.stages > 1 else (),
        trial.device,
        trial.training.activation_checkpointing,
        trial.training.accumulation_steps,
        trial.training.compile,
        trial.training.float32_matmul_precision,
        trial.training.cudnn_autotuning,
    )


def pipeline_counts(trial: Trial) -> tuple[int, int] | None:
    """Return the numbers of stages and micro-batches; None without a pipeline."""
    micro_batches = trial.option("micro_batches")
    if trial.placement.stages == 1 or micro_batches is None:
        return None
    return trial.placement.stages, int(micro_batches)


def why_not_equivalent(trial: Trial) -> str | None:
    """Explain why a trial is lossy and may end differently; None if it is exact."""
    return " and ".join(trial.inexact_reasons) or None


def exact_form(trial: Trial) -> Trial:
    """Return the same trial with the options that make it equivalent."""
    return trial.model_copy(
        update={
            "strategy_options": trial.strategy_options.exact_form(),
            "transport_options": trial.transport_options.exact_form(),
            "training": trial.training.model_copy(update={"batch_norm": "global"}),
        }
    )
