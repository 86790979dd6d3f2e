from __future__ import annotations

from paceline.analysis.statistics import Interval
from paceline.cli.batch_findings import print_batch_findings
from paceline.spec.tables import Target
from paceline.tune.batch.prediction import MIB
from paceline.tune.batch.search import BatchFinding, Probe
from paceline.tune.batch.training import Trained


def test_table_shows_memory_speed_and_what_does_not_fit(capsys):
    found = BatchFinding(
        workload="tiny",
        configuration="tiny.local.none.sequential.n1r1t1.fp32",
        largest_batch=188,
        limited_by="memory",
        probes=[
            Probe(
                global_batch=188,
                predicted_bytes=2058 * MIB,
                measured_bytes=2258 * MIB,
                samples_per_s=25.1,
            ),
            Probe(global_batch=222, predicted_bytes=2300 * MIB, reason="too much"),
        ],
    )
    print_batch_findings([found])
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "tiny.local.none.sequential.n1r1t1.fp32: at most 188, limited by memory"
    assert rows[0].split() == ["188", "2058", "MiB", "2258", "MiB", "0.91", "25.1"]
    assert rows[1].split() == ["222", "2300", "MiB", "does", "not", "fit"]
    assert max(map(len, rows)) <= 80


def test_trainings_show_quality_and_time_to_the_target_in_80_columns(capsys):
    interval = Interval(median=12.3, low=11.0, high=13.0)
    trained = [
        Trained(
            global_batch=16, scaling="linear", learning_rate=0.03, repeats=3,
            metrics={"loss": 0.5, "accuracy": 0.71}, samples_per_s=interval, target_reached=3,
            time_to_target_s=interval, samples_to_target=9600, is_fastest=True,
        ),
        Trained(
            global_batch=1024, scaling="sqrt", learning_rate=0.2400001, repeats=3,
            metrics={"loss": 0.9, "accuracy": 0.4}, samples_per_s=interval, target_reached=1,
        ),
        Trained(
            global_batch=2048, scaling="sqrt", learning_rate=0.3, repeats=0, reason="too much",
        ),
    ]  # fmt: skip
    found = BatchFinding(
        workload="tiny", configuration="c", largest_batch=2048, limited_by="memory",
        target=Target(metric="accuracy", at_least=0.7), trained=trained,
    )  # fmt: skip
    print_batch_findings([found])
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("Training with these batch sizes, accuracy of at least 0.7:")
    heading, *rows = lines[start + 1 : start + 5]
    assert heading.split() == [
        "batch", "scaling", "rate", "samples/s", "accuracy", "to", "target", "samples", "reached",
    ]  # fmt: skip
    assert rows[0].split() == [
        "16", "linear", "0.03", "12.3", "0.710", "12.3", "s", "9600", "3", "of", "3", "*",
    ]  # fmt: skip
    assert rows[1].split() == ["1024", "sqrt", "0.24", "12.3", "0.400", "missed", "1", "of", "3"]
    assert rows[2].split() == ["2048", "sqrt", "0.3", "no", "memory"]
    assert lines[start + 5] == "* fastest to the target, or not significantly slower"
    assert max(map(len, lines)) <= 80


def test_trainings_without_a_target_show_all_metrics(capsys):
    row = Trained(
        global_batch=16, scaling="linear", learning_rate=0.03, repeats=3,
        metrics={"loss": 0.5, "accuracy": 0.71},
    )  # fmt: skip
    found = BatchFinding(
        workload="tiny", configuration="c", largest_batch=16, limited_by="memory", trained=[row]
    )
    print_batch_findings([found])
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("Training with these batch sizes:")
    assert lines[start + 1].split() == [
        "batch", "scaling", "rate", "samples/s", "loss", "accuracy",
    ]  # fmt: skip
    assert lines[start + 2].split()[-2:] == ["0.500", "0.710"]
