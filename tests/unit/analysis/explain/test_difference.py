"""Intervals of differences cover the truth, and equal configurations rarely differ."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.analysis.explain.difference import TOTAL, PartNoise, difference
from paceline.analysis.explain.pair import TimeOnCores, split_time_on_cores
from paceline.analysis.explain.parts import PART_NAMES, PARTS, TrialParts

STEP_S = np.array([0.6, 0.05, 0.0, 0.1, 0.15, 0.05, 0.05, 0.0])
RUN_NOISE, STEP_NOISE = 0.02, 0.1
PAIR = ("0", "1")


def repeats_of(random: np.random.Generator, mean_s, count, steps, run_noise=RUN_NOISE):
    found = {}
    for repeat in range(count):
        run = np.exp(run_noise * random.standard_normal())
        noise = np.exp(STEP_NOISE * random.standard_normal((len(PARTS), steps)))
        values = mean_s[:, None] * run * noise
        found[repeat] = TrialParts(means=values.mean(axis=1))
    return found


def noise_of(configurations):
    """The noise of each part, by the numbers of the configurations."""
    values: dict[str, dict[str, dict[int, float]]] = {}
    for number, found in enumerate(configurations):
        whole = float(np.mean([parts.means.sum() for parts in found.values()]))
        for repeat, parts in found.items():
            seconds = dict(zip(PART_NAMES, parts.means, strict=True)) | {TOTAL: parts.means.sum()}
            for name, value in seconds.items():
                values.setdefault(name, {}).setdefault(str(number), {})[repeat] = value / whole
    return {name: PartNoise.of_run(found) for name, found in values.items()}


@pytest.mark.parametrize("repeats", [2, 5])
def test_equal_configurations_rarely_differ_and_intervals_cover_zero(repeats: int) -> None:
    random = np.random.default_rng(repeats)
    claims, covered, trials = 0, 0, 60
    for _ in range(trials):
        sides = [repeats_of(random, STEP_S, repeats, 30) for k in range(5)]
        found = difference(sides[0], sides[1], noise_of(sides), PAIR)
        claims += found.is_significant
        covered += found.difference_s.low <= 0 <= found.difference_s.high
    assert claims <= 0.05 * trials
    assert covered >= 0.9 * trials


def test_a_true_difference_is_found_in_its_part() -> None:
    random = np.random.default_rng(7)
    longer = STEP_S + np.array([0, 0.2, 0, 0, 0, 0, 0, 0.0])
    sides = [repeats_of(random, mean, 3, 40) for k, mean in enumerate([STEP_S, longer])]
    third = repeats_of(random, STEP_S, 3, 40)
    found = difference(sides[0], sides[1], noise_of([*sides, third]), PAIR)
    assert found.is_significant
    assert found.difference_s.mean == pytest.approx(0.2, abs=0.05)
    part = found.part("data_wait")
    assert part.difference_s.low > 0.15
    assert part.difference_s.high < 0.25
    assert part.share == pytest.approx(1.0, abs=0.3)
    assert found.part("comm_transfer").difference_s.low < 0.01


def test_a_noisy_configuration_does_not_hide_the_difference_of_two_others() -> None:
    """Twelve percent, four repeats, a deviation of 2 %; beside one with a deviation of 10 %."""
    random = np.random.default_rng(11)
    found, trials = 0, 20
    for _ in range(trials):
        quiet = [
            repeats_of(random, mean, 4, 200)
            for key, mean in enumerate([STEP_S, 1.12 * STEP_S, STEP_S, STEP_S])
        ]
        noisy = repeats_of(random, STEP_S, 4, 200, 0.1)
        noise = noise_of([*quiet, noisy])
        found += difference(quiet[0], quiet[1], noise, PAIR).is_significant
    assert found >= 0.8 * trials


def test_with_one_repeat_no_difference_is_significant() -> None:
    random = np.random.default_rng(3)
    sides = [repeats_of(random, mean, 1, 2000) for mean in (STEP_S, STEP_S * 1.5)]
    found = difference(sides[0], sides[1], noise_of(sides), PAIR)
    assert not found.is_significant
    assert not np.isfinite(found.difference_s.high)
    assert found.difference_s.mean == pytest.approx(0.5, abs=0.1)


def test_configurations_without_a_common_repeat_are_not_paired() -> None:
    random = np.random.default_rng(5)
    first = repeats_of(random, STEP_S, 2, 30)
    second = {n + 10: p for n, p in repeats_of(random, 2 * STEP_S, 3, 30).items()}
    found = difference(first, second, noise_of([first, second]), PAIR)
    assert found.repeats == 0
    assert found.difference_s.mean == pytest.approx(1.0, rel=0.1)
    assert found.difference_s.low > 0.7


def test_factors_of_the_time_on_cores_by_hand() -> None:
    # 1 s of CPU time on 2 cores at 100 %; then 1.5 s on 1 core at 75 %: 0.5 s become 2 s
    before = TimeOnCores(wall_s=0.5, cpu_s=1.0, cores=2)
    after = TimeOnCores(wall_s=2.0, cpu_s=1.5, cores=1)
    cpu, allocated, share = split_time_on_cores(before, after)
    mean = 1.5 / np.log(4)
    assert cpu.difference_s == pytest.approx(mean * np.log(1.5))
    assert allocated.difference_s == pytest.approx(mean * np.log(2))
    assert share.difference_s == pytest.approx(mean * np.log(1 / 0.75))
    assert (share.faster, share.slower) == (1.0, 0.75)


def test_equal_factors_make_no_difference() -> None:
    same = TimeOnCores(wall_s=0.5, cpu_s=1.0, cores=2)
    assert [f.difference_s for f in split_time_on_cores(same, same)] == [0.0, 0.0, 0.0]
