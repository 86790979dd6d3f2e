"""The gate: which later runs pass, which are too slow, and which train something else."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.analysis import fabricate

from paceline.analysis.between_runs.gate import judge
from paceline.analysis.between_runs.speeds import (
    BaselineTraining,
    RunSpeeds,
    read_reference,
    read_speeds,
    why_other_training,
)
from paceline.analysis.statistics.rates import RepeatRate
from paceline.base.errors import DataError, ExitCode
from paceline.cli import main
from paceline.measure.records.layout import RunFiles
from paceline.plan.trials.trial import Trial
from paceline.show.report.runs import gate_sentences

LIMIT = 0.03
PAIRS = 20


@pytest.fixture
def trials() -> dict[str, Trial]:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI, fabricate.SPARK]
    found = [fabricate.make_trial_value(way) for way in ways]
    return {trial.configuration: trial for trial in found}


def run_of(trials: dict[str, Trial], logs: NDArray[np.float64]) -> RunSpeeds:
    """logs: shape (configurations, repeats)."""
    rates = {
        name: {repeat: RepeatRate(log_rate=float(log)) for repeat, log in enumerate(row)}
        for name, row in zip(trials, logs, strict=True)
    }
    return RunSpeeds(
        manifest={}, rates=rates, trials=trials, equivalent=dict.fromkeys(trials, True)
    )


def noisy_run(
    trials: dict[str, Trial], random: np.random.Generator, slower: float = 0.0, repeats: int = 5
) -> RunSpeeds:
    """Runs with a noise of 1.5 % and 2 % that all share in a repeat; the last one is slower."""
    logs = 0.015 * random.standard_normal((len(trials), repeats))
    logs = logs + 0.02 * random.standard_normal(repeats)
    logs[-1] += math.log1p(-slower)
    return run_of(trials, logs)


def codes(trials: dict[str, Trial], slower: float) -> list[int]:
    """Return the exit codes of runs that are often too short to see the limit."""
    random = np.random.default_rng(3)
    found = []
    for _ in range(PAIRS):
        before, after = noisy_run(trials, random), noisy_run(trials, random, slower)
        found.append(judge(before, after, LIMIT, allows_undecided=True).exit_code)
    return found


def test_equal_runs_pass_in_19_of_20(trials: dict[str, Trial]) -> None:
    assert codes(trials, 0.0).count(ExitCode.OK) >= 19


def test_ten_percent_are_found_in_19_of_20(trials: dict[str, Trial]) -> None:
    assert codes(trials, 0.1).count(ExitCode.SLOWER) >= 19


def test_a_run_exactly_as_slow_as_allowed_passes_in_19_of_20(trials: dict[str, Trial]) -> None:
    assert codes(trials, LIMIT).count(ExitCode.OK) >= 19


def test_the_stated_slowdown_is_found_in_80_percent(trials: dict[str, Trial]) -> None:
    random = np.random.default_rng(4)
    one = dict(list(trials.items())[:1])
    runs = [(noisy_run(one, random), noisy_run(one, random)) for _ in range(300)]
    stated = [judge(*pair, LIMIT).detectable for pair in runs]
    typical = float(np.median([each for each in stated if each is not None]))
    found = [
        judge(before, run_of(one, _logs(after) + math.log1p(-typical)), LIMIT).exit_code
        for before, after in runs
    ]
    assert 0.74 <= found.count(ExitCode.SLOWER) / len(found) <= 0.88


def _logs(speeds: RunSpeeds) -> NDArray[np.float64]:
    rates = [[rate.log_rate for rate in row.values()] for row in speeds.rates.values()]
    return np.array(rates)


def test_a_faster_run_passes_and_an_interval_decides_as_the_code_says(
    trials: dict[str, Trial],
) -> None:
    random = np.random.default_rng(5)
    faster = run_of(trials, _logs(noisy_run(trials, random)) + math.log(1.5))
    assert judge(noisy_run(trials, random), faster, LIMIT).exit_code == ExitCode.OK
    slow = judge(noisy_run(trials, random), noisy_run(trials, random, 0.1), LIMIT)
    for each in slow.judged:
        assert (each.judgement == "slower") <= (each.ratio.high < 1 - LIMIT)


def test_without_noise_or_without_a_finished_repeat_nothing_passes(
    trials: dict[str, Trial],
) -> None:
    random = np.random.default_rng(6)
    once = noisy_run(trials, random, repeats=1)
    gate = judge(noisy_run(trials, random), once, LIMIT)
    assert gate.exit_code == ExitCode.NOT_COMPARABLE
    assert gate.detectable is None
    name = list(trials)[-1]
    after = noisy_run(trials, random)
    rates = {key: value for key, value in after.rates.items() if key != name}
    failed = dataclasses.replace(after, rates=rates, unfinished=(name,))
    gate = judge(noisy_run(trials, random), failed, LIMIT)
    assert gate.exit_code == ExitCode.NOT_COMPARABLE
    assert {e.configuration: e.judgement for e in gate.judged}[name] == "no result"
    left_out = dataclasses.replace(failed, unfinished=())
    gate = judge(noisy_run(trials, random), left_out, LIMIT, allows_undecided=True)
    assert gate.exit_code == ExitCode.OK


def test_a_slowdown_that_could_not_have_been_seen_is_undecided(trials: dict[str, Trial]) -> None:
    random = np.random.default_rng(7)
    before = noisy_run(trials, random)
    after = run_of(trials, _logs(before) + math.log1p(-0.01))
    gate = judge(before, after, LIMIT)
    assert gate.exit_code == ExitCode.NOT_COMPARABLE
    assert {each.judgement for each in gate.judged} == {"undecided"}
    needed = max(each.needed_repeats or 0 for each in gate.judged)
    assert 12 <= needed <= 60
    longer, again = (noisy_run(trials, random, repeats=needed + 5) for _ in range(2))
    assert judge(longer, again, LIMIT).exit_code == ExitCode.OK
    sentences = gate_sentences(gate, dict.fromkeys(trials, "x"))
    assert sentences[0] == "Gate undecided for 3 of 3 configurations:"
    assert "could not have been seen; measure about" in sentences[1]
    blind = tuple(dataclasses.replace(each, detectable=0.999) for each in gate.judged)
    *_, last = gate_sentences(dataclasses.replace(gate, judged=blind), dict.fromkeys(trials, "x"))
    assert last == "Not even a slowdown of 90 % would fail this test in 80 % of cases."


@pytest.fixture
def baseline() -> BaselineTraining:
    return BaselineTraining(
        training=fabricate.make_trial_value(fabricate.SEQUENTIAL).training,
        initial_weights=("aa",),
        losses=(2.0, 1.9, 1.8),
        rounding={},
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"losses": (2.0, 1.9 * (1 + 4e-4), 1.8)}, None),
        ({"losses": (2.0,)}, None),
        ({"losses": (None, None, None)}, None),
        ({"losses": (2.0, 1.9, 1.75)}, "the loss of the baseline in step 2 is 1.75, not 1.8"),
        ({"losses": (2.01, 1.9, 1.8)}, "in step 0"),
        ({"initial_weights": ("bb",)}, "begins with other weights"),
        ({"training": {"global_batch": 16}}, "global_batch is 16, not 8"),
        ({"training": {"max_steps": 99, "dataset": "elsewhere"}}, None),
    ],
)
def test_other_trainings_are_named(
    baseline: BaselineTraining, change: dict[str, Any], reason: str | None
) -> None:
    if "training" in change:
        change = {"training": baseline.training.model_copy(update=change["training"])}
    found = why_other_training(baseline, dataclasses.replace(baseline, **change))
    assert found is None if reason is None else reason in str(found)


def make(root: Path, way: Any = None, scale: float = 1.0, repeats: int = 5) -> str:
    ways = [fabricate.SEQUENTIAL, fabricate.MPI if way is None else way]
    case = fabricate.Case(time_scale=scale)
    fabricate.make_run(root, ways, cases=[case], repeats=repeats, jitter=0.02)
    return str(root)


def test_command_ends_with_the_code_and_the_reason(tmp_path: Path, capsys: Any) -> None:
    first, same = make(tmp_path / "a"), make(tmp_path / "b")
    words = ["compare", first, same, "--fail-slower", "3%"]
    assert main(words) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "Gate passed: of 2 configurations, none is shown to be more than 3 % slower" in shown
    assert "would fail this test in 80 % of cases" in shown

    slow = make(tmp_path / "slow", scale=1.1)
    junit = tmp_path / "junit.xml"
    assert main(["compare", first, slow, *words[3:], "--junit", str(junit)]) == ExitCode.SLOWER
    assert "slower by more than 3 %: 0.91 of the speed" in capsys.readouterr().out
    cases = list(ET.parse(junit).getroot().iter("testcase"))
    assert [case.find("failure") is not None for case in cases] == [True, True]

    wrong = dataclasses.replace(fabricate.MPI, gradient_error=1.0, weights_error=1.0)
    other = make(tmp_path / "other", wrong, scale=1.1)
    assert main(["compare", first, other, *words[3:], "--json"]) == ExitCode.NOT_EQUIVALENT
    gate = json.loads(capsys.readouterr().out)["gate"]
    assert gate["exit_code"] == 9
    reasons = {each["judgement"]: each["reason"] for each in gate["judged"]}
    assert reasons.keys() == {"slower", "not equivalent"}
    assert "gradient" in reasons["not equivalent"]


def test_undecided_fails_unless_it_is_allowed(tmp_path: Path, capsys: Any) -> None:
    runs, junit = [make(tmp_path / name) for name in "ab"], tmp_path / "junit.xml"
    words = ["compare", *runs, "--fail-slower", "1%", "--junit", str(junit)]
    for allowed, code, failures, sentence in (
        ([], ExitCode.NOT_COMPARABLE, "2", "Gate undecided for 2 of 2 configurations"),
        (["--allow-undecided"], ExitCode.OK, "0", "In 2 of them a slowdown of 1 % could not have"),
    ):
        assert main([*words, *allowed]) == code
        assert sentence in " ".join(capsys.readouterr().out.split())
        assert ET.parse(junit).getroot().get("failures") == failures


def test_reference_replaces_the_earlier_run(tmp_path: Path, capsys: Any) -> None:
    first, slow = make(tmp_path / "a"), make(tmp_path / "b", scale=1.1)
    file = str(tmp_path / "reference.json")
    assert main(["compare", first, "--save-reference", file]) == ExitCode.OK
    capsys.readouterr()
    found = {}
    for name, words in {"runs": [first, slow], "file": [slow, "--reference", file]}.items():
        assert main(["compare", *words, "--fail-slower", "3%", "--json"]) == ExitCode.SLOWER
        document = json.loads(capsys.readouterr().out)
        found[name] = document["gate"], document["rows"], document["differences"]
    assert found["runs"] == found["file"]
    assert read_speeds(RunFiles(tmp_path / "a")).baselines


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"manifest": {}, "schema": 1}', '{"manifest": {}, "rates": {"a": {}}}',
     '{"manifest": {}, "rates": {"a": {"0": {"log_rate": NaN}}}}'],
)  # fmt: skip
def test_other_files_are_no_reference(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(DataError, match=r"file\.json: expected"):
        read_reference(file)


@pytest.mark.parametrize(
    "words",
    [["--fail-slower", "3%"], ["--fail-slower", "3", "B"], ["--fail-slower", "100%", "B"],
     ["--junit", "x.xml", "B"], ["--allow-undecided", "B"], ["--save-reference", "x", "B"]],
)  # fmt: skip
def test_wrong_words_are_refused(tmp_path: Path, words: list[str]) -> None:
    run = make(tmp_path, repeats=1)
    assert main(["compare", run, *(run if each == "B" else each for each in words)]) == 2
