"""Trials in turn, and what they decide; the trials themselves are fabricated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.progress import Quiet
from tests.support.rows import ENDED_WELL
from tests.unit.analysis import fabricate
from tests.unit.analysis.ways import SEQUENTIAL, Way

from paceline.analysis.explain.explanation import Explanation, explain
from paceline.analysis.explain.parts import ExplainedTrials
from paceline.analysis.statistics.intervals import estimate
from paceline.analysis.trial.reading import load_run
from paceline.errors import NotComparable, RankFailed, UsageError
from paceline.host.machine import machine_facts
from paceline.plan.trial import Trial
from paceline.records.layout import RunFiles, TrialFiles
from paceline.records.rows import Outcome
from paceline.runner import measure_more, verification
from paceline.runner.directory import check_machine
from paceline.runner.measure_more import run_interleaved

STREAMING = dataclasses.replace(SEQUENTIAL, full_trace=True)
SLOW = dataclasses.replace(STREAMING, data_wait_s=0.3)


def outcome_of(trial: Trial, status: Any = "ok") -> Outcome:
    failed = {"exit_code": 5, "message": "it failed"} if status != "ok" else {}
    return dataclasses.replace(ENDED_WELL, trial_id=trial.id, status=status, **failed)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fabricate each trial that is run; a streaming one waits for data."""
    ran: list[tuple[str, str]] = []

    def run_trial(trial: Trial, files: TrialFiles) -> Outcome:
        ran.append((files.root.parents[1].name, trial.id))
        way = SLOW if trial.training.reading == "stream" else STREAMING
        case = fabricate.Case(steps=trial.training.max_steps, warmup_steps=2)
        fabricate.make_trial(files, trial, way, case, 1000.0 * len(ran), 0.01)
        return outcome_of(trial)

    monkeypatch.setattr("paceline.runner.run_trial.run_trial", run_trial)
    launcher = SimpleNamespace(preflight=lambda trial: None)
    monkeypatch.setattr(measure_more, "launcher_for", lambda name: launcher)
    return ran


def trial_of(way: Way = STREAMING, **training: Any) -> Trial:
    trial = fabricate.make_trial_value(way)
    changed = trial.training.model_copy(update={"max_steps": 12, "warmup_steps": 2, **training})
    return trial.model_copy(update={"training": changed})


def test_sides_take_turns_and_neither_is_always_first(tmp_path: Path, trials: Any) -> None:
    sides = {"a": trial_of(), "b": trial_of(reading="stream")}
    progress = Quiet()
    files = run_interleaved(sides, tmp_path / "out", repeats=3, limit_s=1e6, progress=progress)
    assert [place for place, _ in trials] == ["a", "b", "b", "a", "a", "b"]
    assert progress.shown == [(n, 6) for n in range(1, 7)]
    assert [record.trial.repeat for record in load_run(files["b"])] == [0, 1, 2]


def test_after_the_limit_only_two_repeats_run(tmp_path: Path, trials: Any) -> None:
    sides = {"a": trial_of(), "b": trial_of()}
    run_interleaved(sides, tmp_path, repeats=9, limit_s=0.0, progress=Quiet())
    assert len(trials) == 4


def test_a_folder_with_contents_is_refused(tmp_path: Path, trials: Any) -> None:
    (tmp_path / "notes").touch()
    with pytest.raises(UsageError, match="expected a new or empty directory"):
        run_interleaved({"a": trial_of()}, tmp_path, repeats=2, limit_s=1, progress=Quiet())
    assert trials == []


def test_a_failed_trial_ends_the_comparison(
    tmp_path: Path, trials: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = lambda trial, files: outcome_of(trial, "failed")  # noqa: E731
    monkeypatch.setattr("paceline.runner.run_trial.run_trial", failing)
    with pytest.raises(RankFailed, match="it failed"):
        run_interleaved({"a": trial_of()}, tmp_path, repeats=2, limit_s=1, progress=Quiet())


def explained(root: Path) -> Explanation:
    """A configuration that waits for data, beside one that does not."""
    case = fabricate.Case(steps=20, warmup_steps=2)
    sides = []
    for name, way in (("quick", STREAMING), ("slow", SLOW)):
        run = fabricate.make_run(root / name, [way], cases=[case], repeats=3, jitter=0.01)
        records = [
            dataclasses.replace(r, trial=trial_of(reading="stream", max_steps=20))
            if name == "slow" else r
            for r in load_run(run)
        ]  # fmt: skip
        for number, record in enumerate(records):
            trial = record.trial.model_copy(update={"repeat": number})
            records[number] = dataclasses.replace(record, trial=trial)
        sides.append(ExplainedTrials(name, records))
    return explain(sides[0], sides[1], estimate(0.38, 0.01, 4))


def test_a_slow_reader_is_supported_by_data_from_memory(tmp_path: Path, trials: Any) -> None:
    explanation = explained(tmp_path)
    assert explanation.intervention is not None
    assert explanation.intervention.cause == "slow_reader"
    found = verification.verify(explanation, tmp_path / "out", limit_s=600, progress=Quiet())
    assert found.answer == "supported"
    assert found.saved_s.mean == pytest.approx(0.29, rel=0.05)
    assert found.expected_s == pytest.approx(0.29, rel=0.05)
    assert {place for place, _ in trials} == {"unchanged", "changed"}
    assert found.repeats == 4


def test_steps_are_left_out_or_the_limit_is_refused(tmp_path: Path, trials: Any) -> None:
    explanation = explained(tmp_path)
    outside_s = 0.5 + 2 + 1 + 0.25  # launch, imports, data loading, teardown of a trial
    step_s = explanation.slower_s
    limit_s = 4 * (outside_s + 15.5 * step_s)
    verification.verify(explanation, tmp_path / "out", limit_s=limit_s, progress=Quiet())
    (record, *_) = load_run(RunFiles(tmp_path / "out" / "changed"))
    assert record.trial.training.max_steps == 15
    assert record.trial.limits.trial_s == limit_s
    with pytest.raises(UsageError, match="--limit: expected at least"):
        verification.verify(explanation, tmp_path / "no", limit_s=1, progress=Quiet())


def test_without_an_intervention_the_user_is_told_what_to_do(tmp_path: Path, trials: Any) -> None:
    explanation = dataclasses.replace(explained(tmp_path), intervention=None)
    with pytest.raises(NotComparable, match="remove it yourself, run the spec again"):
        verification.verify(explanation, tmp_path / "out", progress=Quiet())
    assert trials == []


def test_a_run_of_another_machine_is_refused(tmp_path: Path) -> None:
    here = machine_facts()
    check_machine({"host": here}, tmp_path)
    check_machine({}, tmp_path)  # trials that were started by hand
    with pytest.raises(NotComparable, match="elsewhere"):
        check_machine({"host": {**here, "host": "elsewhere"}}, tmp_path)
