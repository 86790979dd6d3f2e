"""Two stages in one run directory; what each does is tested elsewhere, so both are made up here."""

from __future__ import annotations

import pytest
from tests.unit.runner.tune.conftest import SPEC

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.loading import load_spec
from paceline.runner.trials.directory import extended_spec
from paceline.runner.tune import local


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(SPEC + "[tune]\n")
    return path


@pytest.fixture
def stages(spec, monkeypatch, tmp_path):
    """Record the stages that run; a stage named in `interrupted` ends half-way."""
    calls, interrupted = [], set()

    def search(asked, run_dir, *, resume, progress):
        calls.append(("search", asked.text, run_dir, resume))
        write_json(RunFiles(run_dir).manifest, {"spec_toml": spec.read_text()})
        if "search" in interrupted:
            raise KeyboardInterrupt
        RunFiles(run_dir).tuned_spec.write_text(SPEC)
        return "findings"

    def run(asked, run_dir, *, resume, progress, keep_going, changed_script):
        calls.append(("run", asked.text, run_dir, resume))
        write_json(RunFiles(run_dir).manifest, {"spec_toml": SPEC})
        if "run" in interrupted:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(local, "make_datasets", lambda *_: {"tiny": str(tmp_path)})
    monkeypatch.setattr(local, "tune_local", search)
    monkeypatch.setattr(local.experiment, "run", run)
    return calls, interrupted


def run(spec, run_dir, *, resume=False):
    return local.tune_and_run(load_spec(str(spec)), run_dir, resume=resume, progress=None)


def test_search_comes_first_and_its_spec_is_run(spec, stages, tmp_path):
    calls, _ = stages
    out = tmp_path / "out"
    assert run(spec, out) == ("findings", [])
    assert calls == [
        ("search", spec.read_text(), out / "tune", False),
        ("run", (out / "tune" / "tuned.toml").read_text(), out, False),
    ]


@pytest.mark.parametrize(
    ("stage", "found", "resumed"),
    [
        ("search", "findings", [("search", True), ("run", False)]),
        ("run", None, [("run", True)]),  # and not searched again
    ],
)
def test_interrupted_stage_is_gone_on_with(spec, stages, tmp_path, stage, found, resumed):
    calls, interrupted = stages
    interrupted.add(stage)
    with pytest.raises(KeyboardInterrupt):
        run(spec, tmp_path / "out")
    interrupted.clear()
    calls.clear()
    assert run(spec, tmp_path / "out", resume=True) == (found, [])
    assert [(name, resume) for name, _, _, resume in calls] == resumed


def test_run_that_got_further_repeats_is_gone_on_with(spec, stages, tmp_path):
    calls, _ = stages
    out = tmp_path / "out"
    run(spec, out)
    more = extended_spec(out, repeats=7)
    assert more.experiment.tune is None
    write_json(RunFiles(out).manifest, {"spec_toml": more.text})
    calls.clear()
    assert run(spec, out, resume=True) == (None, [])
    assert calls == [("run", more.text, out, True)]


def test_search_alone_gets_no_further_repeats(spec, stages, tmp_path):
    _, interrupted = stages
    interrupted.add("search")
    with pytest.raises(KeyboardInterrupt):
        run(spec, tmp_path / "out")
    with pytest.raises(UsageError, match="found only its search; complete it first"):
        extended_spec(tmp_path / "out", repeats=7)


def test_run_that_is_there_is_not_overwritten(spec, stages, tmp_path):
    run(spec, tmp_path / "out")
    with pytest.raises(UsageError, match="paceline run --resume"):
        run(spec, tmp_path / "out")


def test_directory_with_other_things_is_refused(spec, stages, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="new or empty"):
        run(spec, tmp_path / "out")


def test_nothing_to_resume_is_said(spec, stages, tmp_path):
    with pytest.raises(UsageError, match="there is no run to resume"):
        run(spec, tmp_path / "out", resume=True)


def test_another_spec_is_refused(spec, stages, tmp_path):
    run(spec, tmp_path / "out")
    other = spec.with_name("other.toml")
    other.write_text("seed = 9\n" + SPEC + "[tune]\n")
    with pytest.raises(UsageError, match="another spec"):
        run(other, tmp_path / "out", resume=True)


def test_launcher_that_is_missing_is_told_before_the_search(spec, stages, tmp_path, monkeypatch):
    calls, _ = stages
    spec.write_text(spec.read_text() + '[[trials]]\nlauncher = "mpi"\nlocal_strategy = "best"\n')
    monkeypatch.setenv("PACELINE_MPIRUN", str(tmp_path / "no-such-mpirun"))
    with pytest.raises(EnvironmentLacks, match="no-such-mpirun"):
        run(spec, tmp_path / "out")
    assert calls == []
