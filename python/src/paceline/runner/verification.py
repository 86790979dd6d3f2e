"""Test a cause: run the intervention that removes it beside the unchanged configuration."""

from __future__ import annotations

from pathlib import Path

from paceline.analysis.explain.explanation import Explanation
from paceline.analysis.explain.interventions import Verification, judge
from paceline.analysis.explain.parts import ExplainedTrials
from paceline.analysis.trial.reading import load_run
from paceline.errors import NotComparable, UsageError
from paceline.export.run_data import RunData
from paceline.plan.trial import Trial
from paceline.runner.directory import check_machine, default_run_dir
from paceline.runner.measure_more import LEAST_REPEATS, run_interleaved
from paceline.runner.planning import Progress

REPEATS = 4
LIMIT_S = 300.0
_LEAST_STEPS = 10  # after the warm-up


def verify_run(
    run: RunData,
    explanation: Explanation,
    out: Path | None = None,
    *,
    limit_s: float = LIMIT_S,
    progress: Progress,
) -> Verification:
    """Verify an explanation of a run of this machine, see `verify`.

    out: None is runs/NAME-verify-DATE-TIME. Raises NotComparable if the run is of another machine.
    """
    manifest = run.comparison.manifest
    check_machine(manifest, run.files.root)
    folder = out or default_run_dir(f"{manifest.get('name', 'run')}-verify")
    return verify(explanation, folder, limit_s=limit_s, progress=progress)


def verify(
    explanation: Explanation, out: Path, *, limit_s: float = LIMIT_S, progress: Progress
) -> Verification:
    """Run the intervention of an explanation, in turn with the unchanged configuration.

    limit_s: for all trials together; steps are left out if they take longer. The records are in
    two run directories below `out`.
    Raises NotComparable if there is no intervention, UsageError if the limit is too short, and the
    errors of `run_interleaved`.
    """
    intervention = explanation.intervention
    if intervention is None:
        raise NotComparable(_why_no_intervention(explanation))
    steps = _steps_within(explanation, limit_s)
    trials = {"unchanged": explanation.slower_trial, "changed": intervention.trial}
    files = run_interleaved(
        {name: _with_steps(trial, steps, limit_s) for name, trial in trials.items()},
        out,
        repeats=REPEATS,
        limit_s=limit_s,
        progress=progress,
    )
    step_s = {
        name: {
            repeat: found.step_s
            for repeat, found in ExplainedTrials(name, load_run(files[name]))
            .repeats(without_latest=False)
            .items()
        }
        for name in trials
    }
    return judge(
        intervention,
        unchanged_s=step_s["unchanged"],
        changed_s=step_s["changed"],
        explained_s=(explanation.faster_s, explanation.slower_s),
    )


def _why_no_intervention(explanation: Explanation) -> str:
    """Say why there is nothing to run, and what the user can do."""
    pair = f"{explanation.slower} against {explanation.faster}"
    if not explanation.causes:
        return f"{pair}: expected a cause to test, none is named"
    return (
        f"{pair}: expected a cause that a change of the configuration can remove, got "
        f"{', '.join(cause.label for cause in explanation.causes)}; remove it yourself, run the "
        "spec again, and compare both runs with `paceline explain RUN_DIR NEW_RUN_DIR`"
    )


def _steps_within(explanation: Explanation, limit_s: float) -> int:
    """Return how many steps every trial can have; at most as many as the explained trials.

    Raises UsageError if two repeats of both sides do not fit into the limit.
    """
    training = explanation.slower_trial.training
    trials = 2 * LEAST_REPEATS
    known = [row["slower_s"] or 0.0 for row in explanation.outside_steps]
    step_s = explanation.slower_s
    least = training.warmup_steps + _LEAST_STEPS
    possible = int((limit_s / trials - sum(known)) / step_s)
    if possible < least:
        needed_s = trials * (sum(known) + least * step_s)
        raise UsageError(
            f"--limit: expected at least {needed_s:.0f} s for {LEAST_REPEATS} repeats of both "
            f"sides with {least} steps each, got {limit_s:g} s"
        )
    return possible


def _with_steps(trial: Trial, steps: int, limit_s: float) -> Trial:
    """Return the trial with at most so many steps, and with the limit of time."""
    before = trial.training.max_steps
    training = trial.training.model_copy(
        update={"max_steps": steps if before is None else min(before, steps)}
    )
    limits = trial.limits.model_copy(update={"trial_s": min(trial.limits.trial_s, limit_s)})
    return trial.model_copy(update={"training": training, "limits": limits})
