"""Two runs: ratios, significance, and what differs between them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from tests.unit.analysis import fabricate

from paceline.analysis.between_runs.speeds import RunSpeeds, read_speeds
from paceline.analysis.between_runs.two_runs import compare_runs, machine_identity, run_differences
from paceline.analysis.statistics.rates import RepeatRate
from paceline.plan.trials.trial import Trial


def repeats(*log_rates: float) -> dict[int, RepeatRate]:
    return {number: RepeatRate(log_rate=value) for number, value in enumerate(log_rates)}


@pytest.fixture
def trials() -> dict[str, Trial]:
    """Trials of three configurations, by short names."""
    ways = {"a": fabricate.SEQUENTIAL, "b": fabricate.MPI, "c": fabricate.SPARK}
    return {name: fabricate.make_trial_value(way) for name, way in ways.items()}


def speeds(trials: dict[str, Trial], **log_rates: tuple[float, ...]) -> RunSpeeds:
    return RunSpeeds(
        manifest={},
        rates={name: repeats(*values) for name, values in log_rates.items()},
        trials=trials,
        equivalent=dict.fromkeys(log_rates, True),
    )


def test_rows_are_paired_and_the_rest_is_listed(trials: dict[str, Trial]) -> None:
    before = speeds(trials, a=(0.0, 0.01, -0.01), b=(1.0, 1.01, 0.99))
    after = speeds(trials, b=(1.3, 1.31, 1.29), c=(0.5,))
    found = compare_runs(before, after)
    assert (found.only_before, found.only_after) == (("a",), ("c",))
    (row,) = found.rows
    assert row.ratio.estimate == pytest.approx(math.exp(0.3))
    assert row.ratio.low < math.exp(0.3) < row.ratio.high
    assert row.before.estimate == pytest.approx(math.exp(1.0))
    assert row.after.estimate == pytest.approx(math.exp(1.3))
    assert row.is_different
    assert found.faster == [row]
    assert found.slower == []


def test_the_interval_is_near_that_of_welch(trials: dict[str, Trial]) -> None:
    found = compare_runs(speeds(trials, a=(0.0, 0.1, 0.2)), speeds(trials, a=(1.0, 1.1, 1.2)))
    # deviation 0.1 in both; four degrees of freedom: t = 2.776445
    half = 2.776445 * 0.1 * math.sqrt(2 / 3)
    # wider: Welch adds up the degrees of freedom of two runs that are equally noisy by chance
    assert 1.0 - 1.5 * half < math.log(found.rows[0].ratio.low) < 1.0 - 0.8 * half
    # either run may have been disturbed in all of its three repeats
    assert 1.0 + 0.8 * half < math.log(found.rows[0].ratio.high) < 1.0 + 2 * half


def test_drift_that_all_share_is_noise(trials: dict[str, Trial]) -> None:
    """Within a run it would cancel."""
    drift = (0.0, 0.3, -0.3)
    before = speeds(trials, a=drift, b=drift)
    after = speeds(trials, a=tuple(d + 0.05 for d in drift), b=tuple(d + 0.05 for d in drift))
    assert [row.is_different for row in compare_runs(before, after).rows] == [False, False]


def test_a_run_of_one_repeat_differs_from_no_other(trials: dict[str, Trial]) -> None:
    before = speeds(trials, a=(0.0, 0.01, -0.01))
    row = compare_runs(before, speeds(trials, a=(1.0,))).rows[0]
    assert not row.is_different
    assert not row.ratio.is_known
    assert row.ratio.estimate == pytest.approx(math.e)


def test_equal_runs_rarely_differ(trials: dict[str, Trial]) -> None:
    random = np.random.default_rng(5)
    wrong = 0
    for _ in range(100):
        runs = []
        for _ in range(2):
            cells = random.normal(0, 0.02, (3, 4)) + random.normal(0, 0.03, 4)
            runs.append(speeds(trials, **dict(zip("abc", map(tuple, cells), strict=True))))
        wrong += any(row.is_different for row in compare_runs(*runs).rows)
    assert wrong <= 12  # a 5 % test of a family: P(more than 12 of 100) is below 0.2 %


def test_speeds_are_read_from_the_files_of_a_run(tmp_path: Path) -> None:
    slow = dataclasses.replace(fabricate.MPI, forward_s=2 * fabricate.MPI.forward_s)
    before = read_speeds(fabricate.make_run(tmp_path / "a", [fabricate.SEQUENTIAL, fabricate.MPI]))
    after = read_speeds(fabricate.make_run(tmp_path / "b", [fabricate.SEQUENTIAL, slow]))
    rows = {row.configuration.split(".")[1]: row for row in compare_runs(before, after).rows}
    assert rows["local"].ratio.estimate == pytest.approx(1)
    assert rows["mpi"].ratio.estimate == pytest.approx(0.345 / 0.445, rel=1e-5)
    assert rows["mpi"].equivalent == (True, True)  # checked now, as no file has the result


def manifest(**changes: object) -> dict[str, object]:
    return {
        "host": {"host": "node0", "cpu_model": "CPU", "usable_cores": 2, "cpu_governor": None},
        "versions": {"torch": "2.13.0"},
        "packages": {"torch": "2.13.0", "numpy": "1.26.4"},
        "git": {"commit": "abc", "has_local_changes": False},
        "spec_toml": 'name = "x"\nrepeats = 3\n[training]\nmax_steps = 8\n[[trials]]\nranks = 2\n',
        **changes,
    }


def test_differences_are_named_by_kind_and_key() -> None:
    after = manifest(
        host={"host": "node0", "cpu_model": "CPU", "usable_cores": 4, "cpu_governor": "powersave"},
        packages={"torch": "2.14.0", "numpy": "1.26.4"},
        git=None,
        spec_toml='name = "y"\n[training]\nmax_steps = 8\n[[trials]]\nranks = 4\n',
    )
    found = [(d.of, d.name, d.before, d.after) for d in run_differences(manifest(), after)]
    assert found == [
        ("machine", "usable_cores", "2", "4"),
        ("machine", "cpu_governor", None, "powersave"),
        ("package", "torch", "2.13.0", "2.14.0"),
        ("git", "commit", "abc", None),
        ("git", "has_local_changes", "False", None),
        ("spec", "name", "x", "y"),
        ("spec", "repeats", "3", None),
        ("spec", "trials.0.ranks", "2", "4"),
    ]
    assert run_differences(manifest(), manifest()) == []


def test_manifests_without_values_do_not_differ() -> None:
    assert machine_identity(manifest()) == ("node0", "CPU", "2")
    assert run_differences({}, {}) == []
    damaged = {"spec_toml": "not TOML"}
    assert run_differences(damaged, damaged) == []
