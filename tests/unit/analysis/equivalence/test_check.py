"""What is the same training passes; what is not is caught, with its reason."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.unit.analysis import fabricate
from tests.unit.analysis.fabricate import pair_of

from paceline.analysis.equivalence.check import (
    Equivalence,
    check_equivalence,
    equivalence_of,
    read_equivalence,
    write_equivalence,
)
from paceline.analysis.equivalence.checks import Check
from paceline.analysis.equivalence.tensor_checks import tensor_differences
from paceline.analysis.equivalence.tolerances import tolerance
from paceline.base.errors import DataError, NotComparable
from paceline.measure.records.layout import TrialFiles
from paceline.plan.trials.sample_order import SampleOrder


def _pair(
    root: Path, changes: dict[str, Any] | None = None, **case: Any
) -> tuple[TrialFiles, TrialFiles]:
    """A trial under MPI and its baseline."""
    mpi = dataclasses.replace(fabricate.MPI, **(changes or {}))
    run = fabricate.make_run(root, [mpi, fabricate.SEQUENTIAL], cases=[fabricate.Case(**case)])
    return pair_of(run)


def _check(equivalence: Equivalence, name: str) -> Check:
    return next(c for c in equivalence.checks if c.name == name)


def _fault(
    trial: TrialFiles, baseline: TrialFiles, name: str, order: SampleOrder | None = None
) -> str:
    """Return the reason why a check has not passed."""
    check = _check(check_equivalence(trial, baseline, order), name)
    assert check.passed is False
    return check.reason


def _edit_sample_log(files: TrialFiles, rank: int, step: int, ids: list[int]) -> None:
    path = files.rank(rank).sample_log
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[step]["sample_ids"] = ids
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_same_bits_are_equivalent_without_reading_tensors(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path)
    trial.weights.unlink()
    trial.gradient.unlink()
    equivalence = check_equivalence(trial, baseline)
    assert equivalence.equivalent is True
    assert equivalence.max_abs_weight_diff == 0


def test_differences_of_rounding_are_equivalent(tmp_path: Path) -> None:
    changes = {"weights_error": 1e-4, "gradient_error": 1e-5}
    trial, baseline = _pair(tmp_path, changes)
    equivalence = check_equivalence(trial, baseline)
    assert equivalence.equivalent is True
    assert _check(equivalence, "first_gradient").value == pytest.approx(1e-5, rel=0.05)
    assert _check(equivalence, "final_weights").value == pytest.approx(1e-4, rel=0.05)
    assert 0 < equivalence.max_abs_weight_diff < 1e-3


def test_a_sum_in_place_of_a_mean_is_caught(tmp_path: Path) -> None:
    # two ranks: gradient and update are twice what they should be
    trial, baseline = _pair(tmp_path, {"weights_error": 1.0, "gradient_error": 1.0})
    equivalence = check_equivalence(trial, baseline)
    assert equivalence.equivalent is False
    assert _check(equivalence, "first_gradient").passed is False
    assert _check(equivalence, "final_weights").passed is False


def test_broken_weights_are_caught_even_where_training_moved_them_little(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path, {"weights_error": 0.3})
    start = load_file(baseline.weights)
    moved = json.loads(baseline.result.read_text())["update_l2"]
    # weights a thousand times as large as their update: absolute differences are small
    large = {n: np.asarray(w * np.float32(1000)) for n, w in start.items()}
    save_file(large, baseline.weights)
    error = {n: np.float32(0.3 * moved[n] / np.sqrt(w.size)) for n, w in large.items()}
    save_file({n: np.asarray(w + error[n]) for n, w in large.items()}, trial.weights)
    assert _check(check_equivalence(trial, baseline), "final_weights").passed is False


def test_one_sample_too_many_in_the_gradient_is_caught(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path, {"gradient_error": 1 / 64, "weights_error": 1e-4})
    assert _check(check_equivalence(trial, baseline), "first_gradient").passed is False


def test_a_value_that_is_not_finite_is_not_equivalent(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path, {"weights_error": 1e-4})
    weights = load_file(trial.weights)
    weights["scale"] = np.array(np.nan, dtype=np.float32)
    save_file(weights, trial.weights)
    equivalence = check_equivalence(trial, baseline)
    assert equivalence.equivalent is False
    assert "scale" in _check(equivalence, "final_weights").reason
    write_equivalence(trial, equivalence)
    json.loads(trial.equivalence.read_text(), parse_constant=pytest.fail)


def test_another_sample_in_a_step_is_caught_and_the_step_named(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path)
    _edit_sample_log(trial, rank=1, step=3, ids=[0, 1, 2, 99])
    assert "steps 3 saw other samples than the baseline" in _fault(trial, baseline, "sample_log")


def test_a_sample_seen_twice_in_an_epoch_is_caught(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path)
    _, first = fabricate.step_samples(fabricate.Case(), 0)
    _edit_sample_log(trial, rank=0, step=1, ids=first[:4])
    reason = _fault(trial, baseline, "sample_log")
    assert "epoch 0 saw samples" in reason
    assert "more than once" in reason


def test_a_dropped_step_is_caught(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path)
    for rank in (0, 1):
        lines = trial.rank(rank).sample_log.read_text().splitlines(keepends=True)
        trial.rank(rank).sample_log.write_text("".join(lines[:4] + lines[5:]))
    assert "steps 4 are missing" in _fault(trial, baseline, "sample_log")


def test_the_last_smaller_batch_of_an_epoch_counts_as_well(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path, samples=41)  # 8 8 8 8 8 1: one rank has none
    assert check_equivalence(trial, baseline).equivalent is True


def test_a_sample_log_that_is_not_the_planned_is_caught(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path)
    order = SampleOrder(row_group_rows=[20, 20], seed=1, global_batch=8, epochs=9, max_steps=12)
    assert "than the planned order" in _fault(trial, baseline, "sample_log", order)


def test_other_training_values_are_named(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path)
    document = json.loads(trial.trial.read_text())
    document["training"].update(learning_rate=0.02, memory_format="channels_last")
    trial.trial.write_text(json.dumps(document))
    reason = _fault(trial, baseline, "training")
    assert "learning_rate is 0.02, the baseline has 0.01" in reason
    assert "memory_format" not in reason


def test_a_rank_that_starts_from_other_weights_is_named(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path)
    fabricate.edit_json(trial.rank(1).environment, initial_weights_sha256="00" * 32)
    assert "rank 1 " in _fault(trial, baseline, "initial_weights")


def test_a_first_loss_that_differs_is_caught(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path)
    path = trial.rank(0).steps
    path.write_text(path.read_text().replace('"loss_sum":4.8', '"loss_sum":4.9', 1))
    check = _check(check_equivalence(trial, baseline), "first_loss")
    assert check.passed is False
    assert check.value == pytest.approx(0.1 / 9.6)


def test_first_loss_of_replicas_with_their_own_statistics_is_not_judged(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path)
    document = json.loads(trial.trial.read_text())
    document["training"]["batch_norm"] = "per-replica"
    trial.trial.write_text(json.dumps(document))
    path = trial.rank(0).steps
    path.write_text(path.read_text().replace('"loss_sum":4.8', '"loss_sum":4.9', 1))
    equivalence = check_equivalence(trial, baseline)
    assert _check(equivalence, "first_loss").passed is None
    assert equivalence.equivalent is None


def test_without_tensors_nothing_is_claimed(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path, {"weights_error": 1e-4})
    trial.weights.unlink()
    equivalence = check_equivalence(trial, baseline)
    assert equivalence.equivalent is None
    assert "its own weights do not exist" in _check(equivalence, "final_weights").reason


def test_what_was_found_holds_after_the_tensors_are_gone(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path, {"weights_error": 1e-4})
    found = check_equivalence(trial, baseline)
    write_equivalence(trial, found)
    trial.weights.unlink()
    trial.gradient.unlink()
    assert equivalence_of(trial, baseline) == found
    assert read_equivalence(trial.equivalence) == found


def test_other_tensors_are_not_comparable(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path, {"weights_error": 1e-4})
    weights = load_file(trial.weights)
    save_file({n: w for n, w in weights.items() if n != "scale"}, trial.weights)
    with pytest.raises(NotComparable, match="scale"):
        tensor_differences(trial.weights, baseline.weights)
    assert check_equivalence(trial, baseline).equivalent is False


def test_a_damaged_tensor_file_is_bad_data_not_another_training(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path, {"weights_error": 1e-4})
    trial.weights.write_bytes(b"not tensors")
    with pytest.raises(DataError, match="expected readable safetensors"):
        check_equivalence(trial, baseline)


def test_tensors_are_compared_in_pieces_as_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(3)
    a = random.standard_normal((37, 5)).astype(np.float32)
    b = random.standard_normal((37, 5)).astype(np.float32)
    save_file({"x": a}, tmp_path / "a")
    save_file({"x": b}, tmp_path / "b")
    monkeypatch.setattr("paceline.analysis.equivalence.tensor_checks._PART_ELEMENTS", 20)
    (found,) = tensor_differences(tmp_path / "a", tmp_path / "b")
    assert found.difference_l2 == pytest.approx(np.linalg.norm(a - b), rel=1e-6)
    assert found.baseline_l2 == pytest.approx(np.linalg.norm(b), rel=1e-6)
    assert found.max_abs == pytest.approx(np.abs(a - b).max(), rel=1e-6)


def test_bf16_is_held_to_its_own_tolerance(tmp_path: Path) -> None:
    changes = {"precision": "bf16", "gradient_error": 0.2, "weights_error": 0.2}
    trial, baseline = _pair(tmp_path, changes)
    equivalence = check_equivalence(trial, baseline)
    assert equivalence.arithmetic == "bf16 against fp32"
    assert equivalence.equivalent is True


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tolerances_never_let_a_sum_pass_for_a_mean(precision: Any) -> None:
    for steps in (1, 20, 64):
        allowed = tolerance(precision, "fp32", steps)
        assert allowed.gradient < 1
        assert allowed.weights < 1


def test_weights_after_many_steps_are_shown_but_prove_nothing(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path, {"weights_error": 0.6}, steps=70)
    equivalence = check_equivalence(trial, baseline)
    check = _check(equivalence, "final_weights")
    assert not check.decisive
    assert check.value == pytest.approx(0.6, rel=0.01)
    assert equivalence.equivalent is True


def test_run_without_checksums_of_replicas_shows_only_its_start(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path, {"weights_error": 1e-4})
    assert check_equivalence(trial, baseline).grade == "whole"
    trial.rank(1).weights.unlink()
    equivalence = check_equivalence(trial, baseline)
    assert (equivalence.equivalent, equivalence.grade) == (True, "start")
    assert not _check(equivalence, "replicas").decisive


def test_step_that_changes_no_weights_is_a_fault_unless_the_baselines_does_not(
    tmp_path: Path,
) -> None:
    trial, baseline = _pair(tmp_path, {"weights_error": 1e-4})

    def lost(steps: dict[int, list[int] | None], usual: list[int]) -> bool | None:
        for rank, unchanged in steps.items():
            fabricate.edit_json(trial.rank(rank).weights, unchanged_after=unchanged)
        fabricate.edit_json(baseline.rank(0).weights, unchanged_after=usual)
        return check_equivalence(trial, baseline).equivalent

    assert lost({0: [1, 5], 1: [5, 7]}, [1]) is False
    assert "in step 4:" in _check(check_equivalence(trial, baseline), "every_step").reason
    assert lost({0: [1, 5], 1: None}, [1]) is False
    assert lost({0: [1, 5], 1: [5, 7]}, [1, 5]) is True
    assert lost({0: [1], 1: [7]}, []) is True  # a rank may own rows that a step does not use


def test_early_weights_of_a_sensitive_baseline_prove_nothing(tmp_path: Path) -> None:
    trial, baseline = _pair(tmp_path, {"weights_error": 1e-4}, steps=20)
    for files, scale in ((trial, 1.5), (baseline, 1.0)):
        weights = load_file(files.weights)
        other = {n: np.asarray(w * np.float32(scale)) for n, w in weights.items()}
        save_file(other, files.weights_at("step16"))
    moved = dict.fromkeys(load_file(baseline.weights), 0.1)
    replayed: dict[str, Any] = {"moved_l2": {"step16": moved}, "rounding": {"step16": 0.01}}
    fabricate.edit_json(baseline.result, replayed=replayed)
    assert check_equivalence(trial, baseline).equivalent is False
    replayed["rounding"]["step16"] = 0.1
    fabricate.edit_json(baseline.result, replayed=replayed)
    check = _check(check_equivalence(trial, baseline), "weights_step16")
    assert (check.passed, check.decisive) == (None, False)
