"""What sends less is no failed copy of the baseline: its bytes, its time and its loss count."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis.fabricate import pair_of

from paceline.analysis.compare.run import Comparison, compare_run
from paceline.analysis.equivalence.check import check_equivalence
from paceline.measure.records.layout import TrialFiles
from paceline.show.report.document import render
from paceline.show.report.table import comparison_text
from paceline.show.report.verdict import verdict_sentence

TOPK = {"method": "topk", "numbers": {"density": 0.01}}
EVERY_6 = {"period_steps": 6, "start_step": 0}
LESS = {"weights_error": 0.9, "gradient_error": 0.9, "more_loss": 0.125, "sent_bytes": 80_000}


def _compare(root: Path, *, uncompressed: bool = True) -> Comparison:
    compressed = dataclasses.replace(fabricate.MPI, compression=TOPK, transfer_s=0.005, **LESS)
    local = dataclasses.replace(fabricate.MPI_GLOO, averaging=EVERY_6, **LESS)
    ways = [fabricate.SEQUENTIAL, compressed, local]
    if uncompressed:
        ways.append(dataclasses.replace(fabricate.MPI, sent_bytes=4_000_000))
    return compare_run(fabricate.make_run(root, ways, repeats=2))


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return _compare(tmp_path)


def _compressed_trial(root: Path, **changes: object) -> tuple[TrialFiles, TrialFiles]:
    """Return a compressed trial and its baseline."""
    way = dataclasses.replace(fabricate.MPI, compression=TOPK, **{**LESS, **changes})
    return pair_of(fabricate.make_run(root, [way, fabricate.SEQUENTIAL]))


def test_other_weights_of_a_compressed_trial_are_neither_same_nor_different(tmp_path: Path) -> None:
    found = check_equivalence(*_compressed_trial(tmp_path))
    assert found.equivalent is None
    assert found.lossy == "gradients are compressed (topk 0.01)"
    last = next(check for check in found.checks if check.name == "final_weights")
    assert (last.passed, last.decisive) == (None, False)
    assert last.value == pytest.approx(0.9, rel=0.01)


def test_equal_weights_of_a_compressed_trial_prove_nothing_either(tmp_path: Path) -> None:
    changes = {"weights_error": 0.0, "gradient_error": 0.0}
    trial = _compressed_trial(tmp_path, **changes, more_loss=0.0)
    assert check_equivalence(*trial).equivalent is None


def test_compressed_trial_with_other_samples_is_another_training(tmp_path: Path) -> None:
    trial, baseline = _compressed_trial(tmp_path)
    sample_log = trial.rank(0).sample_log
    rows = [json.loads(line) for line in sample_log.read_text().splitlines()]
    rows[0]["sample_ids"][0] = 39 if rows[0]["sample_ids"][0] != 39 else 38
    sample_log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert check_equivalence(trial, baseline).equivalent is False


def test_bytes_time_and_loss_are_relative_to_the_exact_form(
    comparison: Comparison,
) -> None:
    (found,) = (f for f in comparison.compression if "send-topk" in f.configuration)
    assert found.reference_is_exact_form
    assert found.reference == "tiny.mpi.mpi.processes.n1r2t1.fp32"
    assert found.sent_share == pytest.approx(0.02)
    assert found.loss_difference == pytest.approx(0.125)
    # steps of 0.345 s instead of 0.35
    assert found.speedup.estimate == pytest.approx(
        found.reference_step_s.estimate / found.step_s.estimate
    )
    assert found.speedup.estimate > 1
    assert (found.steps, found.last_steps) == (12, 10)


def test_without_an_exact_form_the_baseline_is_the_reference(comparison: Comparison) -> None:
    (found,) = (f for f in comparison.compression if "local6" in f.configuration)
    assert not found.reference_is_exact_form
    assert found.reference == comparison.baselines["tiny"]
    assert found.loss_difference == pytest.approx(0.125)


def test_own_statistics_are_compared_with_those_of_the_global_batch(tmp_path: Path) -> None:
    own = dataclasses.replace(fabricate.MPI, batch_norm="per-replica", **LESS)
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI, own])
    (found,) = compare_run(run).compression
    assert found.reference == "tiny.mpi.mpi.processes.n1r2t1.fp32"
    assert found.reference_is_exact_form


def test_lossy_configuration_is_not_ranked_and_states_why(comparison: Comparison) -> None:
    row = next(r for r in comparison.rows if "compression" in r.setup.options)
    assert row.equivalence.equivalent is None
    assert not row.ranked
    assert row.equivalence.equivalence_reason == (
        "not equivalent (lossy): gradients are compressed (topk 0.01)"
    )
    assert row.equivalence.is_lossy
    assert comparison.verdicts["tiny"].best == "tiny.mpi.mpi.processes.n1r2t1.fp32"


def test_verdict_does_not_hide_lossy_configurations(tmp_path: Path) -> None:
    comparison = _compare(tmp_path, uncompressed=False)
    assert verdict_sentence(comparison, "tiny") == (
        "Only one configuration, one process, is ranked: no other was shown to be equivalent."
    )


def test_json_has_the_same_numbers(comparison: Comparison) -> None:
    found = comparison.to_json()["gradient_compression"]
    assert [f["configuration"].split("fp32.")[1] for f in found] == ["send-topk0.01", "local6"]
    assert all(f["sent_bytes_per_step"] == 80_000 for f in found)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("width", [80, 104, 140])
def test_table_shows_them_within_the_terminal(comparison: Comparison, width: int) -> None:
    text = comparison_text(comparison, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert "Lossy training" in words
    assert "+0.12" in words
    assert "~ tiny: mpi · mpi · processes 2\u00d71 · send topk 0.01 is not ranked" in words
    assert "† relative to the baseline" in words


def test_without_compression_there_is_no_such_part(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    assert "Gradient compression" not in comparison_text(compare_run(run), 100)
    assert 'id="compression"' not in render(compare_run(run))


def test_report_has_a_section_of_its_own(tmp_path: Path) -> None:
    compressed = dataclasses.replace(fabricate.MPI, compression=TOPK, **LESS)
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI, compressed])
    page = render(compare_run(run))
    assert '<h2 id="compression">' in page
    assert ">~</span>" in page
    assert "2 %" in page
