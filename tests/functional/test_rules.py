"""Recording rules and alerts: their cases hold in Prometheus's own engine, each alert has cases in
which it fires and in which it does not, and they ask for what sidecars tell."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from tests.functional.monitored import needs_prometheus
from tests.functional.prometheus_api import Prometheus
from tests.functional.promql import faults
from tests.support.commands import run_command
from tests.unit.analysis.fabricate import LAUNCHED

from paceline.show.monitor import serve

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
RULES = [
    rule
    for path in sorted((MONITORING / "rules").glob("*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
ALERTS = [rule for rule in RULES if "alert" in rule]
CASES = yaml.safe_load((MONITORING / "tests" / "alerts.yml").read_text())["tests"]


def promtool(*arguments: str) -> str:
    done = run_command(["promtool", *arguments], 60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_package_has_the_same_rules() -> None:
    packaged = Path(serve.__file__).parent / "files" / "rules"
    assert packaged.resolve() == MONITORING / "rules"


@needs_prometheus
def test_cases_of_the_alerts_hold() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(MONITORING / "tests" / "alerts.yml"))


@needs_prometheus
def test_cases_notice_an_alert_that_does_not_fire(tmp_path) -> None:
    shutil.copytree(MONITORING / "rules", tmp_path / "rules")
    shutil.copytree(MONITORING / "tests", tmp_path / "tests")
    alerts = tmp_path / "rules" / "alerts.yml"
    alerts.write_text(alerts.read_text().replace("> 1.25", "> 2"))
    with pytest.raises(AssertionError, match="PacelineStraggler"):
        promtool("test", "rules", str(tmp_path / "tests" / "alerts.yml"))


@needs_prometheus
def test_configuration_and_rules_are_valid() -> None:
    output = promtool("check", "config", str(MONITORING / "prometheus.yml"))
    assert "2 rule files found" in output


def test_every_alert_and_cause_has_a_case_that_fires_and_a_case_that_does_not() -> None:
    fires: set[tuple[str, str | None]] = set()
    silent: set[str] = set()
    for case in CASES:
        series = " ".join(each["series"] for each in case["input_series"])
        for check in case["alert_rule_test"]:
            for alert in check["exp_alerts"]:
                fires.add((check["alertname"], alert["exp_labels"].get("cause")))
            # nothing at all, or one host or run of several
            hosts = set(re.findall(r'(?:host|run)="([a-z]+)"', series))
            told = {
                str(a["exp_labels"].get(k)) for a in check["exp_alerts"] for k in ("host", "run")
            }
            if hosts - told:
                silent.add(check["alertname"])
    assert fires == {(rule["alert"], rule["labels"].get("cause")) for rule in ALERTS}
    assert silent == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("record") or rule["alert"])
def test_rule_asks_for_metrics_and_labels_that_sidecars_have(rule) -> None:
    assert faults(rule["expr"]) == []
    recorded = set(re.findall(r"[a-z_]+:[a-zA-Z0-9_]+:[a-zA-Z0-9_]+|[a-z_]+:[a-z]+$", rule["expr"]))
    assert recorded <= set(RECORDED), rule["expr"]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_says_how_bad_it_is_and_what_it_means(rule) -> None:
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]


@pytest.fixture
def api(recorded_api: Prometheus):
    return recorded_api


@needs_prometheus
@pytest.mark.parametrize("name", sorted(RECORDED))
def test_recording_rule_finds_data_in_a_run(api, name) -> None:
    expr = RECORDED[name]
    while any(other in expr for other in RECORDED):  # recorded ones are not computed for the past
        for other, what in RECORDED.items():
            expr = expr.replace(other, f"({what})")
    assert api.instant(expr, LAUNCHED + 3015), name
