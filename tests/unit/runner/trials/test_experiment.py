"""The stages of a run with trials that are made up: which of them run, and what a failure does."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.progress import Quiet
from tests.support.rows import ENDED_WELL, failure
from tests.support.specs import spec_text, trials_text
from tests.unit.analysis import fabricate

from paceline.analysis.statistics.intervals import levels
from paceline.base.errors import (
    ExitCode,
    NotComparable,
    PacelineError,
    RankFailed,
    TimedOut,
    UsageError,
)
from paceline.measure.records.documents import read_stopping
from paceline.measure.records.files import read_json, write_json
from paceline.measure.records.layout import RunFiles, TrialFiles
from paceline.measure.records.rows import Outcome
from paceline.plan.spec.loading import load_spec
from paceline.plan.trials.trial import Trial
from paceline.runner.trials import experiment
from paceline.runner.trials.directory import extended_spec, recorded_spec
from paceline.runner.trials.run_trial import failure_of_all, is_finished

SPEC = spec_text(tables="[training]; max_steps = 20", repeats=2)
MORE = trials_text(
    'launcher = "local"; local_strategy = "threads"; replicas = 2; oversubscribe = true',
    'launcher = "local"; local_strategy = "processes"; replicas = 2; oversubscribe = true',
)


def outcome(trial_id: str, code: ExitCode, status: str = "failed") -> Outcome:
    if code is ExitCode.OK:
        return dataclasses.replace(ENDED_WELL, trial_id=trial_id)
    return dataclasses.replace(
        ENDED_WELL, trial_id=trial_id, status=status, exit_code=code,
        launcher_exit_status=int(code), message=f"trial {trial_id}: broken\nits log",
    )  # fmt: skip


class MadeUp:
    """Runs a spec whose trials end as `faults` says, by a part of the trial's name."""

    def __init__(self, folder: Path) -> None:
        self.spec = folder / "made-up.toml"
        self.spec.write_text(SPEC + MORE)
        self.out = folder / "run"
        self.faults: dict[str, ExitCode] = {}
        self.status = "failed"
        self.ran: list[str] = []
        self.beside_others: set[str] = set()  # parts of the names of trials
        self.speeds: dict[str, float] = {}
        self.noise = 0.0
        self.progress = Quiet()

    def measure_again(self) -> None:
        text = self.spec.read_text()
        self.spec.write_text(text.replace("measure_again = false", "measure_again = true"))

    def run_trial(self, trial: Trial, files: TrialFiles) -> Outcome:
        self.ran.append(trial.id)
        found = (code for part, code in self.faults.items() if part in trial.id)
        ended = outcome(trial.id, next(found, ExitCode.OK), self.status)
        is_loaded = any(part in trial.id for part in self.beside_others)
        ended = dataclasses.replace(ended, beside_others=is_loaded)
        write_json(files.trial, {})
        write_json(files.outcome, ended)
        return ended

    def run(
        self, changes: Sequence[str] = (), *, resume: bool = False, keep_going: bool | None = None
    ) -> list[Outcome]:
        self.ran.clear()
        self.progress = Quiet()
        spec = load_spec(str(self.spec), changes)
        return experiment.run(
            spec, self.out, resume=resume, progress=self.progress, keep_going=keep_going
        )


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    found = MadeUp(tmp_path)
    monkeypatch.setattr(experiment, "make_datasets", lambda *_: {"tiny": str(tmp_path)})
    monkeypatch.setattr(experiment, "preflight", lambda _: None)
    monkeypatch.setattr(experiment, "check_equivalences", lambda *_, **__: None)
    monkeypatch.setattr("paceline.runner.trials.run_trial.run_trial", found.run_trial)
    return found


def test_failed_configuration_does_not_end_the_run(made_up: MadeUp) -> None:
    made_up.faults = {".threads.": ExitCode.RANK_FAILED}
    failed = made_up.run()
    assert [".threads." in outcome.trial_id for outcome in failed] == [True]
    names = [trial_id.split(".")[3] for trial_id in made_up.ran]
    # the second repeat of a configuration that never finished is left to --resume
    assert sorted(names) == ["processes"] * 2 + ["sequential"] * 2 + ["threads"]


def test_later_repeats_of_a_configuration_that_has_finished_are_tried(made_up: MadeUp) -> None:
    made_up.faults = {".r1": ExitCode.RANK_FAILED}
    made_up.spec.write_text(made_up.spec.read_text().replace("repeats = 2", "repeats = 3"))
    failed = made_up.run()
    assert [outcome.trial_id.rpartition(".")[2] for outcome in failed] == ["r1"] * 3
    assert len(made_up.ran) == 9


def test_every_repeat_of_a_failed_baseline_is_tried(made_up: MadeUp) -> None:
    made_up.faults = {".sequential.": ExitCode.RANK_FAILED}
    assert len(made_up.run()) == 2
    assert len(made_up.ran) == 6


def test_resume_runs_the_failed_and_the_missing_trials_only(made_up: MadeUp) -> None:
    made_up.faults = {".threads.": ExitCode.RANK_FAILED}
    made_up.run()
    made_up.faults = {}
    assert made_up.run(resume=True) == []
    assert [trial_id.split(".")[3] for trial_id in made_up.ran] == ["threads"] * 2
    assert [path.name.split(".")[3] for path in (made_up.out / "attempts").iterdir()] == ["threads"]


def test_trial_beside_other_work_is_measured_again_once_at_the_end_of_its_repeat(
    made_up: MadeUp,
) -> None:
    made_up.measure_again()
    made_up.beside_others = {".threads."}  # always
    assert made_up.run() == []
    shown = [(name.split(".")[3], name.partition(".r")[2]) for name in made_up.ran]
    assert [shown[3], shown[7]] == [("threads", "0.again"), ("threads", "1.again")]
    assert sorted(shown[:3]) == [(n, "0") for n in ("processes", "sequential", "threads")]
    assert len(shown) == 8
    assert made_up.progress.shown[3] == (4, 7)
    assert made_up.progress.shown[-1] == (8, 8)
    assert made_up.run(resume=True) == []
    assert made_up.ran == []


def test_trial_beside_other_work_is_not_measured_again_if_the_spec_says_so(
    made_up: MadeUp,
) -> None:
    made_up.beside_others = {".threads."}
    assert made_up.run() == []
    assert len(made_up.ran) == 6


def test_run_that_ended_before_it_measured_again_is_resumed(made_up: MadeUp) -> None:
    made_up.measure_again()
    made_up.beside_others = {".threads."}
    made_up.faults = {".r1.again": ExitCode.RANK_FAILED}
    assert len(made_up.run()) == 1
    made_up.faults = {}
    assert made_up.run(resume=True) == []
    assert [name.partition(".r")[2] for name in made_up.ran] == ["1.again"]


def test_finished_run_is_resumed_without_planning(
    made_up: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up.run()
    monkeypatch.delattr(experiment, "make_datasets")
    (made_up.out / "replay").mkdir()  # of a run that was killed at its end
    assert made_up.run(resume=True) == []
    assert made_up.ran == []
    assert not (made_up.out / "replay").exists()


def test_changed_spec_is_resumed_with_the_same_changes_only(made_up: MadeUp) -> None:
    changes = ["repeats=1", 'only=["*.threads.*"]']
    made_up.run(changes=changes)
    assert sorted(name.split(".")[3] for name in made_up.ran) == ["sequential", "threads"]
    assert made_up.run(changes=changes, resume=True) == []
    assert made_up.ran == []
    with pytest.raises(UsageError, match="holds a run of another spec"):
        made_up.run(resume=True)


def test_only_the_data_sets_of_selected_trials_are_made(
    made_up: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(experiment, "make_datasets", lambda *given: made.append(given[2]))
    made_up.run(changes=['workloads=[{name="tiny"}, {name="cifar-cnn"}]', 'only=["tiny.*"]'])
    assert made == [{"tiny"}]


def test_first_failure_ends_the_run_if_the_user_wants_that(made_up: MadeUp) -> None:
    made_up.faults = {"tiny": ExitCode.TIMED_OUT}
    made_up.status = "timed_out"
    with pytest.raises(TimedOut, match="--resume"):
        made_up.run(keep_going=False)
    assert len(made_up.ran) == 1


def test_run_of_one_configuration_ends_with_its_first_failure(made_up: MadeUp) -> None:
    made_up.spec.write_text(SPEC)
    made_up.faults = {"tiny": ExitCode.RANK_FAILED}
    with pytest.raises(RankFailed):
        made_up.run()
    assert len(made_up.ran) == 1


def test_interrupted_trial_ends_the_run_at_once(made_up: MadeUp) -> None:
    made_up.faults = {"tiny": ExitCode.INTERRUPTED}
    made_up.status = "interrupted"
    with pytest.raises(PacelineError) as raised:
        made_up.run(keep_going=True)
    assert raised.value.exit_code == ExitCode.INTERRUPTED
    assert len(made_up.ran) == 1


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([ExitCode.TIMED_OUT, ExitCode.RANK_FAILED], ExitCode.RANK_FAILED),
        ([ExitCode.TIMED_OUT, ExitCode.DATA], ExitCode.TIMED_OUT),
        ([ExitCode.DATA, ExitCode.TIMED_OUT], ExitCode.DATA),
        ([ExitCode.ENVIRONMENT], ExitCode.ENVIRONMENT),
    ],
)
def test_exit_code_is_that_of_a_failed_rank_or_of_the_first_fault(
    tmp_path: Path, codes: list[ExitCode], expected: ExitCode
) -> None:
    outcomes = [outcome(f"trial{number}", code) for number, code in enumerate(codes)]
    error = failure_of_all(outcomes, RunFiles(tmp_path))
    assert error.exit_code == expected
    assert all(f"trial{number}" in str(error) for number in range(len(codes)))
    assert str(error).count("broken") == 1  # one reason for all
    assert ("its log" in str(error)) == (len(codes) == 1)
    assert "--resume" in str(error)


def test_error_of_ranks_of_several_trials_stands_once(tmp_path: Path) -> None:
    failed = [
        dataclasses.replace(
            outcome(name, ExitCode.RANK_FAILED),
            message=f"trial {name}: rank 0 of 2 (host a, pid {pid}) failed: ValueError: {error}",
            error=failure(f"ValueError: {error}"),
        )
        for name, pid, error in (
            ("a.r0", 11, "wrong"),
            ("b.r0", 12, "wrong"),
            ("c.r0", 13, "other"),
        )
    ]
    lines = str(failure_of_all(failed, RunFiles(tmp_path))).splitlines()
    assert lines[:3] == [
        "3 trials failed:",
        "  - trial a.r0: rank 0 of 2 (host a, pid 11) failed: ValueError: wrong (also b.r0)",
        "  - trial c.r0: rank 0 of 2 (host a, pid 13) failed: ValueError: other",
    ]


def test_second_repeat_of_the_baseline_serves_if_the_first_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI], repeats=2)
    trials = [
        fabricate.make_trial_value(way, repeat=repeat)
        for repeat in range(2)
        for way in (fabricate.SEQUENTIAL, fabricate.MPI)
    ]
    baselines = [run.trial(trial.id) for trial in trials if trial.is_baseline]
    other = next(run.trial(trial.id) for trial in trials if not trial.is_baseline)
    monkeypatch.setattr(experiment, "_order_of", lambda _: None)

    fabricate.edit_json(baselines[0].outcome, status="failed")
    second = baselines[1].outcome.read_text()
    baselines[1].outcome.unlink()
    experiment.check_equivalences(trials, run, keep_tensors=False)
    assert not other.equivalence.exists(), "the second baseline has not run yet"

    baselines[1].outcome.write_text(second)
    experiment.check_equivalences(trials, run, keep_tensors=False)
    assert is_finished(other)
    assert baselines[1].root.name in other.equivalence.read_text()
    assert baselines[1].weights.exists()
    assert not other.weights.exists()


def test_further_repeats_are_those_of_a_run_that_began_with_them(made_up: MadeUp) -> None:
    made_up.run()
    first = list(made_up.ran)
    made_up.run(["repeats=4"], resume=True)
    assert made_up.progress.looks == list(range(6, 13))
    further = list(made_up.ran)
    assert {trial_id.rpartition(".")[2] for trial_id in further} == {"r2", "r3"}
    manifest = read_json(made_up.out / "manifest.json")
    planned = manifest["trials"]
    assert manifest["spec_toml"] == load_spec(str(made_up.spec), ["repeats=4"]).text
    assert [first, further[3:]] == [planned[:6], planned[9:]]
    # the states of the first baseline are gone, so that of the third repeat comes first
    baseline = next(trial_id for trial_id in planned[6:9] if ".sequential." in trial_id)
    assert further[:3] == [baseline, *(each for each in planned[6:9] if each != baseline)]
    made_up.run(["repeats=4"], resume=True)
    assert made_up.ran == []


def test_interrupted_further_repeats_go_on_in_their_order(made_up: MadeUp) -> None:
    made_up.run()
    made_up.faults, made_up.status = {".r2": ExitCode.INTERRUPTED}, "interrupted"
    with pytest.raises(PacelineError, match="6 of 9 trials done"):
        made_up.run(["repeats=3"], resume=True)
    begun = made_up.ran[0]
    made_up.faults = {}
    spec = recorded_spec(made_up.out)
    assert spec.experiment.repeats == 3
    made_up.ran.clear()
    experiment.run(spec, made_up.out, resume=True, progress=Quiet())
    assert (made_up.ran[0], len(made_up.ran)) == (begun, 3)


def test_fewer_repeats_and_another_machine_are_refused(made_up: MadeUp) -> None:
    made_up.run(["repeats=3"])
    for changes in ((), ["repeats=1"]):
        with pytest.raises(UsageError, match=r"more repeats than the 3 of this run, got [12]; "):
            made_up.run(changes, resume=True)
    with pytest.raises(UsageError, match="holds a run of another spec"):
        made_up.run(["repeats=4", "seed=5"], resume=True)
    fabricate.edit_json(made_up.out / "manifest.json", host={"host": "elsewhere"})
    with pytest.raises(NotComparable, match="elsewhere"):
        made_up.run(["repeats=4"], resume=True)
    made_up.run(["repeats=3"], resume=True)
    assert made_up.ran == []


ADDED = 'launcher="local", local_strategy="pipeline", stages=2, oversubscribe=true'


def test_added_configuration_gets_the_repeats_of_the_others(made_up: MadeUp) -> None:
    made_up.run()
    spec = extended_spec(made_up.out, added=[ADDED])
    made_up.ran.clear()
    assert experiment.run(spec, made_up.out, resume=True, progress=Quiet()) == []
    shown = [(name.split(".")[3], name.rpartition(".")[2]) for name in made_up.ran]
    assert shown == [("pipeline", "r0"), ("pipeline", "r1")]
    assert len(read_json(made_up.out / "manifest.json")["trials"]) == 8
    assert recorded_spec(made_up.out).experiment == spec.experiment
    experiment.run(recorded_spec(made_up.out), made_up.out, resume=True, progress=Quiet())
    assert len(made_up.ran) == 2


def test_added_configuration_and_further_repeats_go_together(made_up: MadeUp) -> None:
    made_up.run()
    spec = extended_spec(made_up.out, repeats=3, added=[ADDED])
    made_up.ran.clear()
    experiment.run(spec, made_up.out, resume=True, progress=Quiet())
    assert [name.rpartition(".")[2] for name in made_up.ran[:2]] == ["r0", "r1"]
    assert len(made_up.ran) == 2 + 4


def test_configuration_is_added_to_a_run_with_automatic_repeats(measured: MadeUp) -> None:
    measured.run()
    measured.speeds["pipeline"] = 3.0
    spec = extended_spec(measured.out, added=[ADDED])
    measured.ran.clear()
    experiment.run(spec, measured.out, resume=True, progress=Quiet())
    assert [name.split(".")[3] for name in measured.ran] == ["pipeline"] * 3
    record = read_stopping(RunFiles(measured.out))
    assert record is not None
    assert record.stopped == "decided"


@pytest.mark.parametrize("steps", [64, 65])
def test_baseline_runs_again_where_added_trainings_replay_its_states(
    made_up: MadeUp, steps: int
) -> None:
    made_up.spec.write_text(
        made_up.spec.read_text().replace("max_steps = 20", f"max_steps = {steps}\nepochs = 99")
    )
    made_up.run()
    manifest = read_json(made_up.out / "manifest.json")
    for _ in range(2):
        spec = extended_spec(made_up.out, added=[ADDED])
        made_up.ran.clear()
        experiment.run(spec, made_up.out, resume=True, progress=Quiet())
        [*first, one, other] = made_up.ran
        assert [name.partition(".r")[2] for name in first] == ["0.again"] * (steps > 64)
        assert all(".sequential." in name for name in first)
        assert (".pipeline." in one, ".pipeline." in other) == (True, True)
        for trial_id in (one, other):  # as before they were added
            shutil.rmtree(made_up.out / "trials" / trial_id)
        write_json(made_up.out / "manifest.json", manifest)


def test_baseline_runs_again_beside_the_new_one_of_an_added_global_batch(made_up: MadeUp) -> None:
    keys = "[training]; max_steps = 65; epochs = 99; batch_per_replica = 8"
    text = 'launcher = "local"; local_strategy = "threads"; oversubscribe = true; replicas = '
    made_up.spec.write_text(spec_text(f"{text}2", tables=keys, repeats=1))
    made_up.run()
    assert len(made_up.ran) == 3
    added = [text.replace("; ", ", ") + number for number in ("2, threads_per_rank = 4", "3")]
    spec = extended_spec(made_up.out, added=added)
    made_up.ran.clear()
    experiment.run(spec, made_up.out, resume=True, progress=Quiet())
    # states of the baseline with 16 samples are gone; that with 24 is new
    names = [(name.split(".")[0], name.split(".")[3], name[-5:] == "again") for name in made_up.ran]
    assert names[:2] == [
        ("tiny-batch16", "sequential", True),
        ("tiny-batch24", "sequential", False),
    ]
    assert sorted(names[2:]) == [
        ("tiny-batch16", "threads", False),
        ("tiny-batch24", "threads", False),
    ]


def test_what_cannot_be_added_is_refused_with_its_reason(made_up: MadeUp) -> None:
    made_up.run()
    with pytest.raises(UsageError, match="equal to an earlier one"):
        extended_spec(made_up.out, added=['launcher="local", local_strategy="sequential"'])
    threads = 'launcher="local", local_strategy="threads", replicas=2, threads_per_rank=2'
    spec = extended_spec(made_up.out, added=[f"{threads}, oversubscribe=true"])
    with pytest.raises(UsageError, match="as an earlier one"):
        experiment.run(spec, made_up.out, resume=True, progress=Quiet())
    with pytest.raises(UsageError, match=r"2 faults:(?s:.*)--add threads: .*needs quotes"):
        extended_spec(made_up.out, added=["threads", 'launcher="no", local_strategy="threads"'])
    fabricate.edit_json(made_up.out / "manifest.json", host={"turns": "2 hosts in turns"})
    with pytest.raises(NotComparable, match="2 hosts in turns"):
        extended_spec(made_up.out, added=[ADDED])


def test_configuration_that_the_run_excludes_is_not_added(made_up: MadeUp) -> None:
    made_up.spec.write_text('only = ["*.threads.*"]\n' + made_up.spec.read_text())
    made_up.run()
    spec = extended_spec(made_up.out, added=[ADDED])
    with pytest.raises(UsageError, match="`only` of its spec or this machine excludes it"):
        experiment.run(spec, made_up.out, resume=True, progress=Quiet())


@pytest.fixture
def measured(made_up: MadeUp, monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    """A run with `repeats = "auto"` whose trials leave records; `speeds` are seconds per step."""

    def run_trial(trial: Trial, files: TrialFiles) -> Outcome:
        made_up.ran.append(trial.id)
        seconds = made_up.speeds[trial.local_strategy]
        draws = random.Random(f"{trial.local_strategy} {trial.repeat}")
        noise = made_up.noise * draws.uniform(-1.0, 1.0)
        way = dataclasses.replace(fabricate.SEQUENTIAL, forward_s=seconds * (1 + noise))
        fabricate.make_trial(files, trial, way, fabricate.Case(), launched=1e9)
        return outcome(trial.id, ExitCode.OK)

    made_up.speeds = {"sequential": 4.0, "threads": 2.0, "processes": 1.0}
    made_up.noise = 0.0001
    text = made_up.spec.read_text().replace("repeats = 2", 'repeats = "auto"\nmax_repeats = 4')
    made_up.spec.write_text(text)
    monkeypatch.setattr("paceline.runner.trials.run_trial.run_trial", run_trial)
    return made_up


def test_automatic_repeats_end_when_the_ranking_is_decided(measured: MadeUp) -> None:
    assert measured.run() == []
    assert len(measured.ran) == 3 * 3
    record = read_stopping(RunFiles(measured.out))
    assert record is not None
    assert record.stopped == "decided"
    assert [each.repeats for each in record.looks] == [3]
    assert record.level == pytest.approx(levels(4)[3])
    measured.run(resume=True)
    assert measured.ran == []
    assert read_stopping(RunFiles(measured.out)) == record


def test_automatic_repeats_are_followed_by_a_fixed_number(measured: MadeUp) -> None:
    measured.spec.write_text(measured.spec.read_text() + "[limits]\nrun_s = 1000\n")
    measured.run()
    with pytest.raises(UsageError, match="more repeats than the 3 of this run, got 3"):
        extended_spec(measured.out, repeats=3)
    spec = extended_spec(measured.out, repeats=4)
    measured.ran.clear()
    experiment.run(spec, measured.out, resume=True, progress=Quiet())
    assert [trial_id.rpartition(".")[2] for trial_id in measured.ran] == ["r3"] * 3
    assert read_stopping(RunFiles(measured.out)) is None
    assert recorded_spec(measured.out).experiment == spec.experiment


def test_automatic_repeats_end_at_their_maximum(measured: MadeUp) -> None:
    measured.speeds["threads"] = 1.01
    measured.noise = 0.1
    measured.run()
    assert len(measured.ran) == 4 * 3
    record = read_stopping(RunFiles(measured.out))
    assert record is not None
    assert record.stopped == "max_repeats"
    assert [each.repeats for each in record.looks] == [3, 4]
    assert all(each.undecided["tiny"] for each in record.looks)


def test_automatic_repeats_end_after_their_time(measured: MadeUp) -> None:
    measured.spec.write_text(measured.spec.read_text() + "[limits]\nrun_s = 1e-9\n")
    measured.run()
    assert len(measured.ran) == 3
    record = read_stopping(RunFiles(measured.out))
    assert record is not None
    assert (record.stopped, record.looks, record.level) == ("time", (), None)


def test_progress_gets_the_run_before_the_first_trial_and_after_each(made_up: MadeUp) -> None:
    made_up.faults = {".threads.": ExitCode.RANK_FAILED}
    made_up.run()
    # the second repeat of the failed configuration is not tried
    assert made_up.progress.looks == [0, 1, 2, 3, 4, 5]
