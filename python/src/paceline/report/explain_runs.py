"""`paceline explain RUN_A RUN_B` for the terminal, which fits 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from paceline.analysis.between_runs.explain_two_runs import side_name
from paceline.report.explain import explanation_view, overview_table
from paceline.report.runs import configuration_names, differences_section
from paceline.report.section import Section, spaced, terminal_view

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from paceline.analysis.between_runs.explain_two_runs import ExplainedRuns
    from paceline.plan.trial import Trial

_STATE = (
    "Repeats of different runs are not paired, so drifts of the machine do not cancel. A "
    "difference between two runs may come from the state of the machine at that time."
)


def explained_runs_view(
    found: ExplainedRuns, labels: tuple[str, str], trials: Iterable[Trial]
) -> RenderableType:
    """Show what differs between the runs, then one pair in detail or a line for each.

    labels: names of the runs. trials: one of each configuration.
    """
    short = configuration_names(trials)
    blocks: list[RenderableType] = [terminal_view(differences_section(found.differences))]
    if len(found.explanations) == 1:
        names = {
            side_name(name, label): f"{called} in {label}"
            for name, called in short.items()
            for label in labels
        }
        blocks.append(explanation_view(found.explanations[0], lambda name: names.get(name, name)))
    else:
        seconds = {side_name(name, labels[1]): called for name, called in short.items()}
        lines = [
            (
                seconds.get(each.slower) or seconds.get(each.faster, each.slower),
                each,
                each.slower in seconds,
            )
            for each in found.explanations
        ]
        heading = f"Steps in {labels[1]} compared with those in {labels[0]}"
        blocks.append(terminal_view(Section(title=heading, table=overview_table(lines))))
    blocks += [Text(f"not compared: {each}") for each in found.not_compared]
    return spaced([*blocks, Text(_STATE, style="dim")])
