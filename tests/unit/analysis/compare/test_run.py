"""From files of known numbers to rows, ties, verdicts and the JSON of the contract."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.between_runs.speeds import read_speeds
from paceline.analysis.compare.row import Row
from paceline.analysis.compare.run import Comparison, compare_run
from paceline.base.errors import DataError, NotComparable, UsageError
from paceline.measure.records.documents import LookRecord, Stopping, write_stopping
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.phases import PHASES
from paceline.plan.trials.trial import measured_again
from paceline.show.report.document import render
from paceline.show.report.verdict import comparison_document, verdict_sentence
from paceline.show.report.wording import table_sentences

# the contract of `paceline compare --json`, schema 2
_ROW_KEYS = {
    "configuration", "workload", "launcher", "transport", "local_strategy", "layout", "options",
    "nodes", "ranks", "threads_per_rank", "precision", "global_batch", "repeats", "samples_per_s",
    "step_s", "speedup", "efficiency", "time_to_first_step_s", "phases_s", "main_cost",
    "cpu_percent", "cpu_percent_peak", "iowait_percent", "ram_percent_peak", "threads_median",
    "memory_peak_bytes",
    "bytes_sent_per_step", "final_loss", "equivalent", "equivalence_reason",
    "max_abs_weight_diff", "failed", "weights_sha256", "replicas", "replicas_per_node", "stages",
    "device", "cores", "memory_peak_kind", "ram_percent_mean", "threads_peak", "pipeline",
}  # fmt: skip


def _row(comparison: Comparison, part: str) -> Row:
    return next(r for r in comparison.rows if part in r.configuration)


def test_reading_a_run_writes_nothing(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    compare_run(run)
    assert read_speeds(run).equivalent == dict.fromkeys(read_speeds(run).rates, True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_row_holds_what_was_put_in(tmp_path: Path) -> None:
    way = dataclasses.replace(fabricate.MPI, clock_offset_s=-7.25)
    comparison = compare_run(fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, way]))
    row = _row(comparison, ".mpi.")
    # a step: 0.01 + 0.1 + 0.2 + 0.01 + 0.02 + 0.005; sequential 0.01 + 0.2 + 0.4 + 0.02 + 0.005
    assert row.speed.step_s.estimate == pytest.approx(0.345, rel=1e-5)
    assert row.speed.samples_per_s.estimate == pytest.approx(8 / 0.345, rel=1e-5)
    assert row.speed.speedup.estimate == pytest.approx(0.635 / 0.345, rel=1e-5)
    assert row.speed.efficiency.estimate == pytest.approx(0.635 / 0.345 / 2, rel=1e-5)
    # launch, imports, rendezvous, data, model, one step
    assert row.times.time_to_first_step_s == pytest.approx(
        0.8 + 2 + 0.25 + 1 + 0.125 + 0.345, rel=1e-5
    )
    assert row.speed.samples == 10 * 8
    assert row.speed.step_median_s == row.speed.step_p95_s == pytest.approx(0.345, rel=1e-5)
    assert row.times.phases_s["comm_wait"] == pytest.approx(
        12 * 0.02 / 2, abs=1e-5
    )  # mean over ranks
    assert row.usage.cpu_percent == pytest.approx(98)
    assert row.usage.cpu_percent_peak == pytest.approx(98)
    assert row.usage.iowait_percent == pytest.approx(1)
    assert row.usage.ram_percent_peak == pytest.approx(25)
    assert row.usage.threads_median == 14
    # loss falls by 0.02 a step from 1.2: mean of steps 2..11
    assert row.result.final_loss == pytest.approx(1.2 - 0.02 * 6.5)
    assert row.equivalence.equivalent is True
    assert row.equivalence.max_abs_weight_diff == 0


def test_speedup_from_launch_to_end_counts_start_and_loading_but_not_the_last_checks(
    tmp_path: Path,
) -> None:
    ways = [fabricate.SEQUENTIAL, dataclasses.replace(fabricate.MPI, bookkeeping_s=30.0)]
    comparison = compare_run(fabricate.make_run(tmp_path, ways))
    start_s, end_s = 2 + 0.25 + 1 + 0.125, 0.25
    one, two = 0.5 + start_s + 12 * 0.635 + end_s, 0.8 + start_s + 12 * 0.345 + end_s
    row, base = _row(comparison, ".mpi."), _row(comparison, "sequential")
    assert row.speed.wall_speedup.estimate == pytest.approx(one / two, rel=1e-5)
    assert row.times.wall_s == pytest.approx(two + 30)
    assert base.speed.wall_speedup.estimate == 1
    assert row.to_json()["wall_speedup"] == row.speed.wall_speedup
    assert "its speedup" in " ".join(render(comparison).split())


def test_one_repeat_of_a_seed_shows_the_whole_training(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI], repeats=2)
    repeats = [files for name, files in run.trials() if ".mpi." in name]
    grades = [_row(compare_run(run), ".mpi.").equivalence.equivalence_grade]
    for files in repeats:
        files.rank(0).weights.unlink()
        grades.append(_row(compare_run(run), ".mpi.").equivalence.equivalence_grade)
    assert grades == ["whole", "whole", "start"]


def test_the_baseline_is_one_by_definition(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL], repeats=2, jitter=0.1)
    row = _row(compare_run(run), "sequential")
    assert (row.speed.speedup.low, row.speed.speedup.estimate, row.speed.speedup.high) == (1, 1, 1)
    assert row.times.phases_s["comm_wait"] is None


def test_rows_come_fastest_first_and_what_is_not_equivalent_last(tmp_path: Path) -> None:
    broken = dataclasses.replace(
        fabricate.SPARK, forward_s=0.01, backward_s=0.02, weights_error=1.0, gradient_error=1.0
    )
    run = fabricate.make_run(
        tmp_path, [fabricate.SEQUENTIAL, broken, fabricate.TORCHRUN, fabricate.MPI]
    )
    comparison = compare_run(run)
    assert [r.setup.launcher for r in comparison.rows] == ["mpi", "torchrun", "local", "spark"]
    assert _row(comparison, ".spark.").equivalence.equivalent is False
    assert any("first_gradient" in note for note in _row(comparison, ".spark.").notes)


def test_best_names_the_runner_up_and_the_phase_that_makes_the_difference(tmp_path: Path) -> None:
    run = fabricate.make_run(
        tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.MPI_GLOO], repeats=3, jitter=0.01
    )
    comparison = compare_run(run)
    best = comparison.verdicts["tiny"]
    assert best.not_separated == ()
    assert 0 < best.detectable < 0.1
    assert best.further_repeats is None
    assert best.runner_up == _row(comparison, ".mpi.gloo.").configuration
    assert best.over_runner_up.low > 1
    assert best.cause.phase == "comm_transfer"
    assert best.cause.faster_s == pytest.approx(0.01, rel=0.05)
    assert best.cause.slower_s == pytest.approx(0.055, rel=0.05)


def test_differences_inside_the_noise_are_not_separated(tmp_path: Path) -> None:
    same = dataclasses.replace(fabricate.MPI, transport="gloo", transfer_s=0.0101)
    run = fabricate.make_run(
        tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI, same], repeats=3, jitter=0.05
    )
    comparison = compare_run(run)
    both = {_row(comparison, ".mpi.mpi.").configuration, _row(comparison, ".gloo.").configuration}
    verdict = comparison.verdicts["tiny"]
    assert {verdict.best, *verdict.not_separated} == both
    assert verdict.ties == ()
    assert verdict.further_repeats is not None


def test_json_has_every_key_of_the_contract_and_no_nan(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI], repeats=2)
    document = json.loads(json.dumps(comparison_document(compare_run(run)), allow_nan=False))
    assert {"schema", "baseline", "verdict", "rows"} <= set(document)
    assert document["schema"] == 2
    assert set(document["verdict"]) >= {"best", "not_separated", "ties", "detectable", "sentence"}
    assert document["baseline"] == compare_run(run).baselines["tiny"]
    for row in document["rows"]:
        assert set(row) >= _ROW_KEYS
        assert list(row["phases_s"]) == list(PHASES)
        assert row["failed"] is None
        assert set(row["speedup"]) == {"estimate", "low", "high"}


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL])
    (files,) = (f for _, f in run.trials())
    files.host("node0").trace.unlink()
    (row,) = compare_run(run).to_json()["rows"]
    assert row["cpu_percent"] is None
    assert row["threads_median"] is None
    assert row["phases_s"]["comm_transfer"] is None


def test_one_repeat_is_noted(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI], jitter=0.05)
    row = _row(compare_run(run), ".mpi.")
    assert any("one repeat" in note for note in row.notes)


def test_failed_trials_are_listed_and_the_rest_compared(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.SPARK])
    trials = dict(run.trials())
    failed = next(f for name, f in trials.items() if ".spark." in name)
    fabricate.edit_json(failed.outcome, status="failed", exit_code=5, message="rank 1 was killed")
    next(f for name, f in trials.items() if ".mpi." in name).outcome.unlink()
    comparison = compare_run(run)
    assert [(r.setup.launcher, r.failed) for r in comparison.rows] == [
        ("local", None),
        ("spark", "failed: rank 1 was killed"),
    ]
    sentence = verdict_sentence(comparison, "tiny")
    assert sentence.endswith("was measured, so there is nothing to compare.")
    assert {(t.status, t.message) for t in comparison.unfinished} == {
        ("failed", "rank 1 was killed"),
        ("not finished", None),
    }


def test_without_a_baseline_nothing_is_compared(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.MPI])
    row = compare_run(run).rows[0]
    assert row.speed.speedup is None
    assert row.equivalence.equivalent is None
    assert row.speed.samples_per_s is not None


def test_a_failed_baseline_is_the_reason_why_nothing_is_ranked(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI])
    failed = next(f for name, f in run.trials() if ".sequential." in name)
    fabricate.edit_json(failed.outcome, status="failed", exit_code=5, message="rank 0: killed\nlog")
    comparison = compare_run(run)
    row = _row(comparison, ".mpi.")
    assert row.equivalence.equivalent is None
    why = "the baseline failed (failed: rank 0: killed)"
    assert row.equivalence.equivalence_reason == f"equivalence not checked: {why}"
    sentence = verdict_sentence(comparison, "tiny")
    assert sentence == f"No configuration is ranked, because {why}."
    assert _row(comparison, "sequential").failed == "failed: rank 0: killed"


@pytest.mark.parametrize("with_same_transport", [False, True])
def test_verdict_and_table_say_where_launcher_and_transport_differ(
    tmp_path: Path, with_same_transport: bool
) -> None:
    ways = [fabricate.SEQUENTIAL]
    shown = [fabricate.MPI, fabricate.SPARK]
    if with_same_transport:
        shown.append(dataclasses.replace(fabricate.MPI, transport="gloo", transfer_s=0.3))
    ways += [dataclasses.replace(way, nodes=2) for way in shown]
    comparison = compare_run(fabricate.make_run(tmp_path, ways, repeats=3, jitter=0.001))
    words = "both differ from those of processes under spark."
    assert words in verdict_sentence(comparison, "tiny")
    sentences = " ".join(table_sentences(comparison))
    assert ("mpi and spark differ in their transport, too" in sentences) != with_same_transport


def test_speedups_are_over_the_fastest_configuration_that_matches_the_chosen_baseline(
    tmp_path: Path,
) -> None:
    run = fabricate.make_run(
        tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.TORCHRUN], repeats=2, jitter=0.01
    )
    plain = compare_run(run)
    torchrun = _row(plain, ".torchrun.").configuration
    chosen = compare_run(run, baseline="*.[lt]o*")  # local and torchrun
    assert chosen.baselines == {"tiny": torchrun}
    assert chosen.sequential == plain.baselines
    row = _row(chosen, ".torchrun.")
    assert row.is_baseline
    assert row.speed.speedup.estimate == 1
    assert row.speed.efficiency.estimate == 1  # relative to its own two cores
    mpi, sequential = _row(chosen, ".mpi."), _row(chosen, "sequential")
    assert mpi.speed.efficiency == mpi.speed.speedup
    assert sequential.speed.efficiency.estimate == 2 * sequential.speed.speedup.estimate
    words = "\N{MULTIPLICATION SIGN} processes under torchrun ("
    assert words in verdict_sentence(chosen, "tiny")
    assert [row.equivalence.equivalent for row in chosen.rows] == [True] * 3
    assert chosen.to_json()["workloads"]["tiny"]["equivalence_baseline"] == plain.baselines["tiny"]


def test_baseline_of_the_spec_is_used_and_one_that_failed_is_replaced(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.TORCHRUN])
    fabricate.edit_json(run.manifest, baseline="*.mpi.*")
    assert _row(compare_run(run), ".mpi.").is_baseline
    next(f for name, f in run.trials() if ".mpi." in name).outcome.unlink()
    comparison = compare_run(run)
    assert _row(comparison, "sequential").is_baseline
    assert "speedups are over the sequential baseline" in comparison.flags[0]
    with pytest.raises(UsageError, match=r"baseline: no configuration matches 'x'[^-]*\n  - tiny"):
        compare_run(run, baseline="x")


def test_ranking_after_repeated_looks_is_tested_at_the_level_of_the_last_look(
    tmp_path: Path,
) -> None:
    run = fabricate.make_run(
        tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.MPI_GLOO], repeats=3, jitter=0.01
    )
    assert compare_run(run).verdicts["tiny"].not_separated == ()
    looks = (LookRecord(repeats=3, level=1e-9, undecided={"tiny": ()}),)
    stopping = Stopping(max_repeats=8, tie_margin=0.05, looks=looks, stopped="decided")
    write_stopping(run, stopping)
    comparison = compare_run(run)
    assert comparison.stopping == stopping
    # the level is below the resolution of the draws, so nothing is separated
    assert len(comparison.verdicts["tiny"].not_separated) == 2
    assert comparison.verdicts["tiny"].margin == 0.05
    assert comparison.to_json()["automatic_repeats"]["looks"][0]["level"] == 1e-9


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotComparable, match=r"trials/<id>/trial\.json"):
        compare_run(RunFiles(tmp_path))


def test_rows_cut_short_and_fields_unknown_are_passed_over(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL])
    (files,) = (f for _, f in run.trials())
    with files.rank(0).steps.open("a") as file:
        file.write('{"step": 12, "epo')
    fabricate.edit_json(files.outcome, of_a_later_version=1)
    assert compare_run(run).rows[0].speed.samples == 80


def test_a_row_without_its_fields_names_the_file(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL])
    (files,) = (f for _, f in run.trials())
    files.rank(0).steps.write_text('{"step": 0}\n')
    with pytest.raises(DataError, match=r"steps\.jsonl.*StepRow"):
        compare_run(run)


def test_precisions_share_one_baseline_for_speed(tmp_path: Path) -> None:
    fast = dataclasses.replace(
        fabricate.SEQUENTIAL, precision="bf16", forward_s=0.1, backward_s=0.2
    )
    comparison = compare_run(fabricate.make_run(tmp_path, [fast, fabricate.SEQUENTIAL]))
    assert comparison.baselines["tiny"].endswith("fp32")
    row = _row(comparison, "bf16")
    assert row.speed.speedup.estimate == pytest.approx(0.635 / 0.335, rel=1e-5)
    assert row.speed.efficiency is None  # of another precision than the baseline
    assert not row.is_baseline
    assert [r.training.precision for r in comparison.rows if r.is_baseline] == ["fp32"]


def test_rows_say_how_a_node_was_used(tmp_path: Path) -> None:
    ways = [
        *fabricate.LOCAL_WAYS,
        dataclasses.replace(fabricate.HYBRID, nodes=2, transport="gloo", launcher="mpi"),
    ]
    comparison = compare_run(fabricate.make_run(tmp_path, ways))
    shapes = {
        (r.setup.local_strategy, r.placement.nodes): (
            r.placement.replicas,
            r.placement.replicas_per_node,
            r.placement.stages,
            r.placement.threads_per_worker,
            r.placement.cores,
        )
        for r in comparison.rows
    }
    assert shapes == {
        ("sequential", 1): (1, 1, 1, 1, 1),
        ("intraop", 1): (1, 1, 1, 2, 2),
        ("threads", 1): (2, 2, 1, 1, 2),
        ("processes", 1): (2, 2, 1, 1, 2),
        ("pipeline", 1): (1, 1, 2, 1, 2),
        ("hybrid", 1): (2, 2, 2, 1, 2),
        ("hybrid", 2): (4, 2, 2, 1, 4),
    }
    assert all(r.equivalence.equivalent for r in comparison.rows)


def test_efficiency_is_against_the_allocated_cores(tmp_path: Path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.HYBRID])
    row = _row(compare_run(run), "hybrid")
    # 4 ranks share 2 cores; a step: 0.01 + 0.12 + 0.24 + 0.08 + 0.02 + 0.02 + 0.005
    assert row.speed.efficiency.estimate == pytest.approx(0.635 / 0.495 / 2, rel=1e-5)


def test_peak_memory_is_proportional_where_it_was_read(tmp_path: Path) -> None:
    two = dataclasses.replace(
        fabricate.MPI, nodes=2, run_pss_bytes=700_000_000, run_rss_bytes=800_000_000
    )
    comparison = compare_run(fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, two]))
    sequential, several = _row(comparison, "sequential"), _row(comparison, ".mpi.")
    assert (sequential.usage.memory_peak_bytes, sequential.usage.memory_peak_kind) == (10**9, "rss")
    assert (several.usage.memory_peak_bytes, several.usage.memory_peak_kind) == (
        1_400_000_000,
        "pss",
    )
    assert several.usage.threads_peak == 28
    assert several.usage.ram_percent_mean == pytest.approx(25)


def test_unequal_budgets_come_with_the_comparison(tmp_path: Path) -> None:
    four = dataclasses.replace(fabricate.PROCESSES, ranks=4)
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.INTRAOP, four])
    assert any("allocated cores differ" in flag for flag in compare_run(run).flags)


def test_the_reason_can_be_the_bubble(tmp_path: Path) -> None:
    idle = dataclasses.replace(fabricate.PIPELINE, schedule="gpipe", bubble_s=0.2)
    ways = [fabricate.SEQUENTIAL, fabricate.PIPELINE, idle]
    best = compare_run(fabricate.make_run(tmp_path, ways, repeats=2)).verdicts["tiny"]
    assert best.cause.phase == "bubble"


def test_trial_that_was_measured_again_is_one_more_repeat_of_its_configuration(tmp_path) -> None:
    run = fabricate.make_run(tmp_path, [fabricate.SEQUENTIAL, fabricate.MPI], repeats=2)
    trial = measured_again(fabricate.make_trial_value(fabricate.MPI, repeat=1))
    assert trial.id.endswith(".r1.again")
    assert (trial.planned_repeat, trial.is_again) == (1, True)
    files = run.trial(trial.id)
    fabricate.make_trial(
        files, trial, fabricate.MPI, fabricate.Case(), fabricate.LAUNCHED + 9000.0, 0.0
    )
    found = compare_run(run)
    rows = {row.setup.launcher: row for row in found.rows}
    assert (rows["mpi"].repeats, rows["local"].repeats) == (3, 2)
    assert rows["mpi"].equivalence.equivalent
    again = [each for each in found.load.by_trial if each.endswith(".again")]
    assert found.load.measured_again == len(again)
    assert trial.id in render(found)
