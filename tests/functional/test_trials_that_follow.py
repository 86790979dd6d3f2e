"""Trials of a run follow one another within seconds, on the same hosts and in the same series: what
*Compare* says of one must not be what was left of the one before."""

from __future__ import annotations

import json
import re

import pytest
from tests.functional.dashboards import query
from tests.functional.monitored import needs_prometheus
from tests.functional.prometheus_api import fill_in
from tests.support.commands import run_command

from paceline.measure.records.metrics import RUN_FACTS

LIMIT_S = 60
HERE = 'host="a",run="r"'
# Seconds: the first trial has 0 to 19, and ends with the marks that an import puts there; the
# second begins at 21, takes its first step after 30, and is looked at after 59.
FIRST, SECOND = "local", "spark"
SERIES = {
    f"paceline_run_info{{{HERE},@first}}": "1x19 NaN",
    f"paceline_run_info{{{HERE},@second}}": "_x21 1x38",
    # no number before it is first read
    f"paceline_run_proportional_memory_bytes{{{HERE}}}": "900x19 NaN _x9 600x28",
    f'paceline_training_samples_total{{{HERE},rank="0"}}': "0+10x19 _ 0x9 0+2x28",
    f'paceline_training_step_seconds_sum{{{HERE},rank="0"}}': "0+1x19 _ 0x9 0+1x28",
}


def _facts(launcher: str) -> str:
    values = {**dict.fromkeys(RUN_FACTS, "1"), "launcher": launcher, "trial": launcher}
    return ",".join(f'{fact}="{value}"' for fact, value in values.items())


@needs_prometheus
@pytest.mark.parametrize(
    ("title", "legend", "first", "second"),
    [
        ("Memory by launcher", "{{launcher}}", 900, 600),
        (
            "Throughput by launcher, transport, strategy and ranks",
            "{{launcher}} · {{transport}} · {{local_strategy}} · ranks {{ranks}}",
            10,
            2,
        ),
    ],
)
def test_trial_is_told_by_what_is_its_own(tmp_path, title, legend, first, second) -> None:
    names = {"@first": _facts(FIRST), "@second": _facts(SECOND)}
    inputs = []
    for series, values in SERIES.items():
        mark = next((mark for mark in names if mark in series), "")
        inputs.append({"series": series.replace(mark, names.get(mark, "")), "values": values})
    labels = re.findall(r"{{(\w+)}}", legend)
    keys = ", ".join(labels)
    asked = fill_in(query("compare", title, legend), run="r", range_s=60)
    # as whole numbers: promtool compares exactly
    expr = f"round(sum by ({keys}) ({asked}))"
    wanted = []
    for launcher, value in ((FIRST, first), (SECOND, second)):
        more = "".join(f', {label}="1"' for label in labels[1:])
        wanted.append({"labels": f'{{launcher="{launcher}"{more}}}', "value": value})
    case = {
        "interval": "1s",
        "input_series": inputs,
        "promql_expr_test": [{"expr": expr, "eval_time": "59s", "exp_samples": wanted}],
    }
    file = tmp_path / "case.yml"
    file.write_text(json.dumps({"evaluation_interval": "1s", "tests": [case]}))
    done = run_command(["promtool", "test", "rules", file], LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
