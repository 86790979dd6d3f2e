"""Benchmarks: generated run directories can be read, and simulated collectives are right."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.unit.analysis import fabricate

import paceline
from paceline.analysis.compare.run import compare_run
from paceline.measure.records.layout import RunFiles
from paceline.plan.spec.loading import shipped_experiments
from paceline.train.data.batches import Feed

BENCHMARKS = Path(__file__).parents[2] / "python" / "benchmarks"


def test_generated_run_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("analysis")
    run = RunFiles(tmp_path / "run")
    benchmark.generate(run, argparse.Namespace(configurations=3, repeats=2, steps=40))
    rows = compare_run(run).rows
    assert [row.repeats for row in rows] == [2, 2, 2]
    assert all(row.equivalence.equivalent for row in rows)


def test_a_slow_reader_delivers_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(Feed, "__init__", Feed.__init__)  # so that pytest restores it
    importlib.import_module("seeded_rank").slow_reader(0.0)
    batches: list[Any] = ["first", "second"]
    with Feed(lambda _stopped: iter(batches)) as feed:
        assert list(feed) == batches


def test_configurations_of_a_run_are_compared_with_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("aa_repeats")
    ways = [fabricate.SEQUENTIAL, fabricate.INTRAOP, fabricate.MPI]
    run = fabricate.make_run(tmp_path / "run", ways, repeats=6, jitter=0.05)
    out = tmp_path / "aa.json"
    words = [str(run.root), "--out", str(out), "--draws", "20", "--repeats", "2", "3"]
    monkeypatch.setattr("sys.argv", ["aa_repeats.py", *words])
    benchmark.main()
    document = json.loads(out.read_text())
    assert len(document["log_samples_per_s"]) == 3
    for found in document["results"].values():
        assert 0 <= found["pairs"] <= 0.2  # of 60
        assert found["too_slow"] <= found["two_runs"] + 0.05
    words = [str(out), *words[1:], "4"]  # a file in place of the run
    monkeypatch.setattr("sys.argv", ["aa_repeats.py", *words])
    with pytest.raises(
        SystemExit, match="expected 8 repeats that every configuration finished, got 6"
    ):
        benchmark.main()


def test_a_finished_run_is_shown_with_its_load_seeds_traces_and_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    finished_run = importlib.import_module("finished_run")
    case = fabricate.Case(evaluate_every_steps=6)
    run = fabricate.make_run(
        tmp_path / "run", [fabricate.SEQUENTIAL, fabricate.MPI], cases=[case], repeats=2
    )
    shown = finished_run.document(
        paceline.load(run.root), ["curves", "seeds", "traces", "messages"]
    )
    json.dumps(shown)
    metric = next(iter(shown["rows"][0]["last"]))
    for row in shown["rows"]:
        curve = shown["seeds"][row["configuration"]][metric]
        assert [len(values) for values in curve.values()] == [2, 2]
        assert list(curve.values())[-1] == row["last"][metric]
        first = shown["curves"][row["configuration"]][metric]
        assert first == {steps: values[0] for steps, values in curve.items()}
        trace = shown["traces"][row["configuration"]]
        assert {len(values) for values in trace.values()} == {len(trace["time_s"])}
        assert row["others_percent"] is not None
    for message in shown["messages"]:
        assert message["bytes"] > 0


@pytest.mark.parametrize(
    ("least_bytes", "most_bytes", "expected"),
    [(0, 10**5, "below 10^5"), (10**5, 10**6, "10^5 to 10^6"), (10**8, None, "from 10^8")],
)
def test_sizes_of_messages_are_powers_of_ten(
    monkeypatch: pytest.MonkeyPatch, least_bytes: int, most_bytes: int | None, expected: str
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    of = SimpleNamespace(least_bytes=least_bytes, most_bytes=most_bytes)
    assert importlib.import_module("finished_run").bounds(of) == expected


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The simulation of collectives; the test is skipped without SimGrid."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("simulation")
    reason = module.why_not()
    if reason is not None:
        pytest.skip(reason)
    return module


def test_without_contention_the_simulated_time_is_that_of_the_formulas(
    simulation: ModuleType,
) -> None:
    job = importlib.import_module("simulation_job")
    values = {"payload_bytes": 10**6, "latency_s": 1e-4, "bytes_per_s": 1e8}
    jobs = [job.Simulation(algorithm=each, ranks=5, **values) for each in job.SCHEDULES]
    # A rank beyond a power of two sends to its neighbour while all others wait.
    assert simulation.simulate(jobs) == pytest.approx([each.formula_s for each in jobs], rel=1e-6)
    ring = job.Simulation(algorithm="ring", ranks=40, **values)
    assert ring.simulated_messages < ring.cost.messages  # its equal rounds are extrapolated
    assert simulation.simulate([ring]) == pytest.approx([ring.formula_s], rel=1e-6)


def test_racks_share_their_uplinks(simulation: ModuleType) -> None:
    """Two racks of two hosts; the uplinks are half as fast as one host's link.

    Recursive doubling: first within the racks (1), then both hosts of a rack over its uplink (4).
    """
    job = importlib.import_module("simulation_job")
    racks = job.Topology(rack_hosts=2, oversubscription=4.0)
    rounds, path = simulation.contended_cost("recursive-doubling", 4, racks)
    assert path == pytest.approx(1 + 4)
    assert rounds == pytest.approx(1 + 2)  # twice the cables between racks


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program that measures all raw files."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("run_all")


def test_every_measurement_names_an_experiment_or_programs_with_their_options(
    run_all: ModuleType,
) -> None:
    def is_spec(name: str) -> bool:
        return name in shipped_experiments() or (BENCHMARKS / name).is_file()

    shown = importlib.import_module("finished_run").SHOWN
    measurements = run_all.measurements()
    files = [each.file for each in measurements]
    assert len(files) == len(set(files))
    for each in measurements:
        assert (each.experiment is None) != (not each.commands), each.file
        assert set(each.show) <= set(shown), each.file
        if each.experiment is not None:
            assert is_spec(each.experiment), each.file
        for command in each.commands:
            program, name, *words = command.split()
            if program == "paceline":
                assert is_spec(words[0]), command
                continue
            source = (BENCHMARKS / name).read_text("utf-8")
            options = [word for word in words if word.startswith("--")]
            assert all(f'"{option}"' in source for option in options), command
            assert "{out}" in words, command


def test_every_raw_file_is_measured_but_five(run_all: ModuleType) -> None:
    """The head of run_all.toml says why they are not."""
    measured = {each.file for each in run_all.measurements()}
    raw = {path.stem for path in run_all.RAW.glob("*.json")}
    apart = {
        "torch_versions", "public_scripts", "library_agreement", "dashboard_panels",
        "verify_first_runs",
    }  # fmt: skip
    assert raw - measured == apart


def test_what_this_version_has_measured_is_not_measured_again(
    run_all: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    first, second, third = (each.file for each in run_all.measurements()[:3])
    for file, version in ((first, run_all.__version__), (second, "0.0.1")):
        (tmp_path / f"{file}.json").write_text(json.dumps({"versions": {"paceline": version}}))
    words = ["--work", str(tmp_path), "--raw", str(tmp_path), "--only", first, second, third]
    monkeypatch.setattr("sys.argv", ["run_all.py", *words, "--plan", "--minutes", "10"])
    run_all.main()
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        second, third,
    ]  # fmt: skip


def test_a_run_that_has_begun_is_completed(run_all: ModuleType, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    words = ["paceline", "run", "quickstart", "--out", run_dir]
    assert run_all.continued(words) == words
    Path(run_dir).mkdir()
    assert run_all.continued(words) == ["paceline", "run", "--resume", run_dir]
    others = ["python", "lab.py", "--out", run_dir]
    assert run_all.continued(others) == others
    search = ["paceline", "tune", "comm", "search.toml", "--out", run_dir]
    assert run_all.continued(search) == ["paceline", "tune", "comm", "--resume", run_dir]


def test_commands_of_experiments_are_shown_without_folders(
    run_all: ModuleType, tmp_path: Path
) -> None:
    declared: dict[str, Any] = {"file": "a", "minutes": 1, "experiment": "x.toml"}
    searched = run_all.Measurement(**declared, search="comm", lab="--cores 1")
    command, shown = run_all.experiment_command(searched, [], tmp_path / "a")
    assert command[:6] == ["paceline", "lab", "up", "--cores", "1", "--exec"]
    assert shown == "paceline lab up --cores 1 --exec 'paceline tune comm x.toml'"
    lab = run_all.beside_load(run_all.Measurement(**declared, own_hosts=True))
    _, shown = run_all.experiment_command(lab, lab.options, tmp_path / "a")
    assert shown == "paceline lab run x.toml --set measure_again=false"


def test_each_pair_of_a_bug_and_its_twin_is_in_its_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    cases = list(importlib.import_module("verify_bugs").declared())
    bugs = [each for each in cases if not each.fixed]
    odd = [each for each in cases if each.kind.startswith("odd")]
    assert len(cases) == 2 * len(bugs) + len(odd)
    assert len(bugs) >= 60
    assert len(odd) >= 30
    assert sum(each.held_out for each in bugs) >= 10
    for kind in {each.kind for each in cases}:
        source = (BENCHMARKS / f"pairs/{kind}.py").read_text("utf-8")
        own = {each.bug for each in cases if each.kind == kind}
        assert all(
            f"def {bug.replace('-', '_')}(" in source or f'"{bug}"' in source for bug in own
        ), kind
        assert kind.startswith("odd") or 5 <= len(own) <= 25, kind


def test_a_bug_with_another_cause_is_found_and_its_twin_with_a_suspicion_is_a_false_alarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    benchmark = importlib.import_module("verify_bugs")
    wrong, twin = list(benchmark.declared())[:2]

    def judged(case: Any, statement: int, reason: str, level: str, code: int) -> Any:
        finding = {"reason": reason, "step": 0, "tensor": None, "level": level}
        shown = {"statement": statement, "findings": [finding]}
        ended = benchmark.Ended(code, json.dumps({"layouts": [{"shown": shown}]}), "", 1.0)
        return benchmark.judged(case, ended)

    found = judged(wrong, 5, "something else", "fault", 9)
    assert (found["found"], found["cause_right"]) == (True, False)
    missed = judged(wrong, 1, "", "remark", 0)
    assert (missed["found"], missed["cause_right"]) == (False, False)
    suspected = judged(twin, 3, "perhaps", "suspicion", 7)
    assert (suspected["as_declared"], suspected["false_alarm"]) == (False, True)
    weaker = judged(twin, 3, "not known", "weaker", 0)
    assert (weaker["as_declared"], weaker["false_alarm"]) == (False, False)
    summary = benchmark.summary_of([found, missed, suspected, weaker])
    assert (summary["bugs"], summary["found"], summary["causes_right"]) == (2, 1, 0)
    assert (summary["twins"], summary["twins_false_alarms"]) == (2, 1)
