"""The commands that follow a run depend on what it has found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tests.unit.analysis import fabricate

from paceline.analysis.compare.run import compare_run
from paceline.show.report.verdict import next_commands, verdict_sentence

RUN = Path("runs/a b")


def commands(folder, repeats, jitter, *, is_shipped=True) -> list[str]:
    same = dataclasses.replace(fabricate.MPI, transport="gloo")
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, same]
    comparison = compare_run(fabricate.make_run(folder, ways, repeats=repeats, jitter=jitter))
    return [command for command, _ in next_commands(comparison, RUN, is_shipped=is_shipped)]


def test_what_is_not_decided_is_repeated_first(tmp_path) -> None:
    assert commands(tmp_path, repeats=3, jitter=0.05) == [
        "paceline run --resume 'runs/a b' --repeats 32", "paceline explain 'runs/a b'"
    ]  # fmt: skip


def test_one_repeat_asks_for_others_and_explains_nothing(tmp_path) -> None:
    assert commands(tmp_path, repeats=1, jitter=0.01) == [
        "paceline run --resume 'runs/a b' --repeats 5", "paceline init my.toml"
    ]  # fmt: skip


def test_decided_run_leads_to_causes_and_to_a_spec_of_the_user(tmp_path) -> None:
    shipped = commands(tmp_path / "1", repeats=5, jitter=0.001)
    assert shipped == ["paceline explain 'runs/a b'", "paceline init my.toml"]
    own = commands(tmp_path / "2", repeats=5, jitter=0.001, is_shipped=False)
    assert own == ["paceline explain 'runs/a b'"]


def test_trials_without_a_spec_cannot_be_repeated(tmp_path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    manifest = json.loads(run.manifest.read_text())
    del manifest["spec_toml"]  # as of trials that were started by hand
    run.manifest.write_text(json.dumps(manifest))
    comparison = compare_run(run)
    assert next_commands(comparison, RUN, is_shipped=False) == []
    assert "--repeats" not in verdict_sentence(comparison, "tiny")


def test_nothing_ranked_leads_nowhere(tmp_path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.MPI])
    comparison = compare_run(run)
    assert next_commands(comparison, RUN, is_shipped=True) == []
