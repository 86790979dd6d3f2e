"""Every sentence of an answer says what made-up runs show: idle, in bursts of load, beside constant
load, with two repeats, of one strategy, and of two workloads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.unit.analysis import fabricate
from tests.unit.analysis.ways import Way

from paceline.analysis.compare.run import compare_run, explain_workload
from paceline.cli import main
from paceline.measure.records.layout import RunFiles
from paceline.show.report.verdict import verdict_sentence

TORCHRUN, SPARK = (  # as fast as over MPI with the same transport
    dataclasses.replace(fabricate.MPI_GLOO, launcher=name) for name in ("torchrun", "spark")
)
WAYS = (
    fabricate.SEQUENTIAL,
    fabricate.PROCESSES,
    fabricate.MPI,
    fabricate.INTRAOP,
    TORCHRUN,
    fabricate.MPI_GLOO,
    SPARK,
)
NAMES = ("idle", "bursts", "constant load", "two repeats", "one strategy", "two workloads")


def slowed(way: Way, factor: float, others_percent: float) -> Way:
    """Return what a way takes beside other processes."""
    return dataclasses.replace(
        way,
        forward_s=factor * way.forward_s,
        backward_s=factor * way.backward_s,
        cpu_percent=99.0,
        others_percent=others_percent,
    )


def make(folder: Path, name: str) -> RunFiles:
    """Fabricate one of the runs."""
    random = np.random.default_rng(4)
    if name == "two workloads":
        cases = [fabricate.Case(), fabricate.Case(workload="other", time_scale=2.0)]
        return fabricate.make_run(folder, WAYS, cases=cases, repeats=5, jitter=0.01)
    changes: dict[str, Callable[[Way, int], Way]] = {
        "bursts": lambda way, _: slowed(way, 2.0, 45.0) if random.random() < 0.2 else way,
        "constant load": lambda way, _: slowed(way, 1.5, 47.0),
    }
    return fabricate.make_run(
        folder,
        WAYS[:1] if name == "one strategy" else WAYS,
        repeats=2 if name == "two repeats" else 5,
        jitter=0.01,
        in_repeat=changes.get(name, lambda way, _: way),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: make(folder / name.replace(" ", "-"), name).root for name in NAMES}


def printed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Return what a command prints, without breaks of lines."""
    assert main([str(word) for word in words]) in (0, 7)
    return " ".join(capsys.readouterr().out.split())


BURSTS = "4 of 35 trials ran beside other work (up to 44 % of the cores)"
TOOK = "while other processes took one of two cores (35 of 35 trials)"
UNDECIDED = "Undecided which of two configurations is the fastest; ahead is processes under local"
TIE = "two configurations within 3 %, led by processes under local on two cores, 1."
FIRST = {  # each sentence up to its first figure that depends on the noise, and its end
    "idle": (f"The fastest are {TIE}", ")."),
    "bursts": (f"The fastest are {TIE}", f"); {BURSTS}."),
    "constant load": (f"W{TOOK[1:]}, the fastest are {TIE}", ")."),
    "two repeats": (f"{UNDECIDED} on two cores, 1.", ")."),
    "one strategy": (
        "Only one configuration, one process, was measured, so there is nothing to compare",
        ".",
    ),
    "two workloads": (f"The fastest are {TIE}", ")."),
}


@pytest.mark.parametrize("name", NAMES)
def test_first_sentence_of_the_verdict_is_the_answer(runs: dict[str, Path], name: str) -> None:
    words = verdict_sentence(compare_run(RunFiles(runs[name])), "tiny")
    begin, end = FIRST[name]
    assert words.startswith(begin)
    first = words.split(" The other: ")[0]
    assert first.endswith(end)


def test_causes_belong_to_the_slower_one_and_launchers_are_compared_alone(
    runs: dict[str, Path],
) -> None:
    words = verdict_sentence(compare_run(RunFiles(runs["idle"])), "tiny")
    assert (
        "Next is intraop with 0.94\u00d7 the speed of the first (0.93 to 0.95), slower mainly "
        "because of threads within operations: computation takes 330 ms a step instead of "
        "285 ms." in words
    )
    assert "The launcher makes no difference (processes over gloo: " in words
    undecided = verdict_sentence(compare_run(RunFiles(runs["two repeats"])), "tiny")
    assert (
        "Whether the launcher makes a difference is undecided (processes over gloo: " in undecided
    )


@pytest.mark.parametrize(
    ("name", "load"),
    [("idle", ""), ("bursts", f"; {BURSTS}"), ("constant load", f", measured {TOOK}")],
)
def test_load_stands_in_the_answers_of_explain_and_predict(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], name: str, load: str
) -> None:
    of_all = "Steps compared with those of local · shared · processes 2\u00d71"
    assert printed(capsys, "explain", runs[name]).startswith(f"{of_all}{load} ms more")
    found = printed(capsys, "predict", runs[name], "--nodes", "2", "--link", "1gbit")
    assert f"as fast as processes 2\u00d71 on one node{load}. So they are faster." in found


def test_explained_pair_says_how_many_of_its_trials_were_loaded(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = printed(capsys, "explain", runs["constant load"], "--only", "*.intraop.*")
    begin = "While other processes took one of two cores (10 of 10 trials), local · intraop"
    assert words.startswith(begin)


def test_gate_says_how_many_trials_were_loaded(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pair = ("compare", runs["idle"], runs["bursts"], "--fail-slower", "5%")
    load = "; other work ran beside 4 of 35 trials of the second run"
    words = printed(capsys, *pair)
    assert f"slower than in the first run (5 %, Holm){load}." in words
    assert f"and undecided in 7{load}." in words


def test_gate_of_two_repeats_prints_no_exponents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [
        fabricate.make_run(tmp_path / name, WAYS[:2], repeats=2, jitter=1.0).root for name in "ab"
    ]
    words = printed(capsys, "compare", *pair, "--fail-slower", "5%")
    assert "Gate undecided for " in words
    assert "e+0" not in words


def test_several_workloads_are_named_in_their_order(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs["two workloads"]
    comparison = compare_run(RunFiles(run))
    assert comparison.workloads == ["tiny", "other"]
    found = printed(capsys, "predict", run, "--nodes", "2", "--link", "1gbit")
    assert found.index("tiny, predicted") < found.index("other, predicted")
    found = printed(capsys, "explain", run)
    heads = [f"{name}: Steps compared with those of" for name in ("tiny", "other")]
    assert found.index(heads[0]) < found.index(heads[1])
    first = explain_workload(comparison, "other")[0]
    found = printed(capsys, "explain", run, "--pair", first.faster, first.slower)
    assert found.startswith("other: ")
