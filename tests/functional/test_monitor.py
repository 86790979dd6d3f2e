"""`paceline monitor` with a real Prometheus: what it imports, scrapes and leaves behind."""

from __future__ import annotations

import http.server
import json
import os
import signal
import stat
import sys
import threading
import time

import psutil
import pytest
from tests.functional.monitored import children_of, monitored, needs_prometheus
from tests.functional.prometheus_api import numbers
from tests.support.waiting import wait_for
from tests.unit.analysis.fabricate import LAUNCHED
from tests.unit.show.monitor.recorded import CPU, MPI, RANK_CORES, make_recorded_run

from paceline.measure.records.files import read_jsonl, write_json

pytestmark = needs_prometheus
SEEN_LIMIT_S = 45.0
AWKWARD, DAMAGED = 'a [run] "of" mine', "damaged"

EXPOSED = """\
# TYPE paceline_run_info gauge
paceline_run_info{host="live",run="recorded",trial="t",launcher="mpi"} 1
# TYPE paceline_rank_failed gauge
paceline_rank_failed{host="live",run="recorded",rank="3"} 1
# TYPE paceline_run_processes gauge
paceline_run_processes{host="live",run="recorded"} 4
"""


class Sidecar(http.server.BaseHTTPRequestHandler):
    """Serves a few metrics."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(EXPOSED.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def run(tmp_path):
    return make_recorded_run(tmp_path / "recorded", (MPI,))


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A run with an awkward name and a damaged trial, and its monitor; tests change neither."""
    run = make_recorded_run(tmp_path_factory.mktemp("shown") / AWKWARD, (MPI,))
    write_json(run.trial(DAMAGED).trial, {"not": "a trial"})
    with monitored(run.root) as monitor:
        monitor.api()
        yield run, monitor


def sound_trial(run):
    """Return the files of the trial that is not damaged, and of its host."""
    [files] = [files for name, files in run.trials() if name != DAMAGED]
    [(_, host)] = files.hosts()
    return files, host


@pytest.fixture
def sidecar():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sidecar)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


def seen(api, expr: str) -> list[dict]:
    """Wait until a query has an answer."""
    return wait_for(lambda: api.instant(expr, time.time()), SEEN_LIMIT_S, expr)


def test_trace_and_prometheus_tell_the_same_numbers(shown) -> None:
    run, monitor = shown
    _, host = sound_trial(run)
    rows = [row for row in read_jsonl(host.trace) if "unix_s" in row]
    ranks = [row for row in read_jsonl(host.ranks) if row["rank"] == 1]
    api = monitor.api()
    for row, rank in list(zip(rows, ranks, strict=True))[::5]:
        at = row["unix_s"]
        [threads] = numbers(api.instant("paceline_run_threads", at))
        assert threads == row["run_threads"]
        [idle] = numbers(api.instant('paceline_host_cpu_seconds_total{mode="idle"}', at))
        assert idle == row["cpu_seconds"]["idle"]
        [own] = numbers(api.instant('paceline_rank_cpu_seconds_total{rank="1"}', at))
        assert own == rank["cpu_seconds"]
    within = LAUNCHED + 8
    [cores] = numbers(api.instant("sum(rate(paceline_rank_cpu_seconds_total[4s]))", within))
    assert cores == pytest.approx(2 * RANK_CORES, rel=1e-6)
    [every] = numbers(api.instant("sum(rate(paceline_host_cpu_seconds_total[4s]))", within))
    assert every == pytest.approx(sum(CPU.values()), rel=1e-6)
    steps = numbers(api.instant("paceline_training_steps_total", rows[-1]["unix_s"]))
    assert steps == [30, 30]


def test_a_trials_facts_and_gauges_end_with_it(shown) -> None:
    run, monitor = shown
    _, host = sound_trial(run)
    last = [row["unix_s"] for row in read_jsonl(host.trace) if "unix_s" in row][-1]
    api = monitor.api()
    assert api.instant("paceline_run_info == 1", last)
    assert api.instant("paceline_run_info == 1", last + 1) == []
    assert numbers(api.instant("paceline_run_threads", last + 1)) == []


def test_live_sidecars_are_scraped_and_rules_are_at_work(run, sidecar) -> None:
    with monitored(run.root) as monitor:
        api = monitor.api()
        target = run.targets / "live.json"
        target.write_text(json.dumps([{"targets": [sidecar], "labels": {"__scheme__": "http"}}]))
        [found] = seen(api, "paceline_run_info")
        assert set(found["metric"]) == {"__name__", "host", "run", "trial", "launcher"}
        [alert] = seen(api, 'ALERTS{alertstate="firing"}')
        assert alert["metric"]["alertname"] == "PacelineRankFailed"
        assert alert["metric"]["rank"] == "3"
        assert numbers(seen(api, "host:paceline_host_runs:count")) == [1.0]
        target.unlink()
        wait_for(
            lambda: not api.instant("paceline_run_info", time.time()),
            SEEN_LIMIT_S, "the end of a sidecar",
        )  # fmt: skip


def test_asked_to_end_it_takes_prometheus_with_it_and_then_shows_the_same_again(run) -> None:
    for how in (signal.SIGTERM, signal.SIGINT):
        with monitored(run.root) as monitor:
            counted = monitor.api().instant("count(paceline_run_threads)", LAUNCHED + 8)
            assert numbers(counted) == [1.0]
            children = children_of(monitor.process.pid)
            assert children
            assert monitor.end(how) == 0
        assert not any(psutil.pid_exists(pid) for pid in children)
        assert "Traceback" not in monitor.log
        assert not (run.monitor / "traces.om").exists()


def test_killed_it_takes_prometheus_with_it(run) -> None:
    with monitored(run.root) as monitor:
        monitor.api()
        children = children_of(monitor.process.pid)
        assert children
        monitor.end(signal.SIGKILL)
        _, alive = psutil.wait_procs(
            [psutil.Process(pid) for pid in children if psutil.pid_exists(pid)], timeout=30
        )
        assert not alive


def test_it_listens_on_loopback_only_and_hides_its_folder(shown) -> None:
    run, monitor = shown
    listening = [
        connection.laddr.ip
        for pid in children_of(monitor.process.pid)
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening == ["127.0.0.1"]
    assert stat.S_IMODE(run.monitor.stat().st_mode) == 0o700


def test_second_monitor_of_a_run_is_told_of_the_first(shown, tmp_path) -> None:
    run, monitor = shown
    with monitored(run.root, log=tmp_path / "second.log") as second:
        assert second.process.wait(timeout=60) == 6
    assert "another `paceline monitor` is running" in second.log
    assert monitor.process.poll() is None


def test_prometheus_that_dies_is_an_error_that_shows_its_log(run) -> None:
    with monitored(run.root) as monitor:
        monitor.api()
        [child] = children_of(monitor.process.pid)
        os.kill(child, signal.SIGKILL)
        assert monitor.process.wait(timeout=30) == 3
    assert "Prometheus ended by itself" in monitor.log
    assert "Traceback" not in monitor.log


def test_grafana_is_started_provisioned_and_ended(run, tmp_path) -> None:
    """Grafana is not to be had here: a program of its name says how it was called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    fake = programs / "grafana"
    told = tmp_path / "told.json"
    fake.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys, time\n"
        "settings = {k: v for k, v in os.environ.items() if k.startswith('GF_')}\n"
        f"json.dump([sys.argv[1:], settings], open({str(told)!r} + '.new', 'w'))\n"
        f"os.rename({str(told)!r} + '.new', {str(told)!r})\n"
        "time.sleep(600)\n"
    )
    fake.chmod(0o755)
    with monitored(run.root, path=f"{programs}:{os.environ['PATH']}") as monitor:
        url = monitor.address("Grafana")
        wait_for(told.exists, 30, "Grafana")
        arguments, settings = json.loads(told.read_text())
        children = children_of(monitor.process.pid)
        assert len(children) == 2
        assert monitor.end() == 0
    assert not any(psutil.pid_exists(pid) for pid in children)
    assert arguments[0] == "server"
    assert url == f"http://127.0.0.1:{settings['GF_SERVER_HTTP_PORT']}"
    assert settings["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_damaged_trial_is_named_and_the_rest_is_shown(shown) -> None:
    _, monitor = shown
    assert monitor.api().instant("paceline_run_threads", LAUNCHED + 8)
    assert f"left out: {DAMAGED}" in monitor.log


def test_run_directory_with_an_awkward_name_is_served(shown) -> None:
    _, monitor = shown
    [found] = monitor.api().instant("paceline_run_threads", LAUNCHED + 8)
    assert found["metric"]["run"] == AWKWARD


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["NOWHERE"], 2, "expected a run directory, found none"),
        (["RUN", "--listen", "9090"], 2, "expected HOST:PORT"),
        (["RUN", "--listen", "192.0.2.1:9090"], 3, "choose another with --listen"),
    ],
)
def test_wrong_use_is_answered_without_a_stack_trace(run, paceline, arguments, code, says) -> None:
    words = [
        {"RUN": str(run.root), "NOWHERE": "/nowhere/run"}.get(word, word) for word in arguments
    ]
    done = paceline.main("monitor", *words)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
