"""The run directory: new, resumed, or refused with what to do."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from paceline.base.errors import NotComparable, UsageError
from paceline.base.host.machine import machine_facts
from paceline.measure.records.files import write_json
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.loading import load_spec
from paceline.runner.trials.directory import (
    check_code,
    check_machine,
    check_run_dir,
    made_run_dir,
    only_runner,
)


@pytest.fixture(scope="module")
def spec():
    return load_spec("quickstart")


@pytest.mark.parametrize("path", ["/proc/no-such-folder/run", "/dev/null/run"])
def test_directory_that_cannot_be_made_is_a_wrong_use(path):
    expected = rf"{path}: expected a directory .* with --out"
    with pytest.raises(UsageError, match=expected), made_run_dir(Path(path)):
        pass


def test_file_in_place_of_the_directory_is_a_wrong_use(tmp_path, spec):
    (tmp_path / "run").write_text("x")
    with (
        pytest.raises(UsageError, match="run: expected a directory"),
        made_run_dir(tmp_path / "run"),
    ):
        pass


def test_directory_that_was_made_in_vain_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), made_run_dir(tmp_path / "a" / "run"):
        raise ZeroDivisionError
    assert not (tmp_path / "a" / "run").exists()


def test_directory_of_the_user_stays_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), made_run_dir(tmp_path):
        raise ZeroDivisionError
    assert tmp_path.exists()


def test_second_runner_is_refused(tmp_path):
    refused = pytest.raises(UsageError, match="another `paceline run`")
    with only_runner(tmp_path), refused, only_runner(tmp_path):
        pass


def test_new_directory_must_be_empty_apart_from_a_search(tmp_path, spec):
    files = RunFiles(tmp_path)
    check_run_dir(files, spec, resume=False)
    files.tune.root.mkdir()
    check_run_dir(files, spec, resume=False)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="expected a new or empty directory"):
        check_run_dir(files, spec, resume=False)


def test_run_that_was_killed_before_its_manifest_can_be_started_again(tmp_path, spec):
    files = RunFiles(tmp_path)
    with only_runner(tmp_path):
        pass
    assert files.lock.exists()
    (tmp_path / ".manifest.json.x1y2").touch()  # a temporary file of write_json
    check_run_dir(files, spec, resume=False)


def test_run_is_resumed_with_its_own_spec_only(tmp_path, spec):
    files = RunFiles(tmp_path)
    with pytest.raises(UsageError, match="expected a run to resume"):
        check_run_dir(files, spec, resume=True)
    write_json(files.manifest, {"spec_toml": spec.text + "\n# a comment"})
    check_run_dir(files, spec, resume=True)
    with pytest.raises(UsageError, match="paceline run --resume"):
        check_run_dir(files, spec, resume=False)
    with pytest.raises(UsageError, match="holds a run of another spec"):
        check_run_dir(files, load_spec("transports"), resume=True)


def test_a_run_of_another_machine_is_refused(tmp_path: Path) -> None:
    here = machine_facts()
    check_machine({"host": here}, tmp_path)
    check_machine({}, tmp_path)  # trials that were started by hand
    with pytest.raises(NotComparable, match="elsewhere"):
        check_machine({"host": {**here, "host": "elsewhere"}}, tmp_path)


def test_code_that_has_changed_since_a_trial_finished_is_refused(tmp_path: Path) -> None:
    run, script = RunFiles(tmp_path / "run"), tmp_path / "train.py"
    script.write_text("first")
    file = {"path": str(script), "sha256": hashlib.sha256(b"first").hexdigest()}
    for name, status in (("a", "ok"), ("b", "failed")):
        trial = run.trial(name)
        write_json(trial.trial, {})
        write_json(trial.outcome, {"status": status})
        write_json(trial.rank(0).sources, {"files": {"train.py": file}})
    check_code(run)
    script.write_text("second")
    with pytest.raises(NotComparable, match=r"changes in train\.py; .*--changed-script"):
        check_code(run)
    write_json(run.trial("a").outcome, {"status": "failed"})  # it is run again with the new one
    check_code(run)
