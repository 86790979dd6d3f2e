"""A real run under several launchers, scraped by a real Prometheus while it goes: what the sidecar
tells is what the dashboards ask for. Its values: test_scrape.py."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest
from tests.functional.cli_runs import LIMIT_S, cli_in, slowed, small, trial
from tests.functional.dashboards import DOCUMENTS, queries
from tests.functional.monitored import monitored, needs_prometheus
from tests.functional.prometheus_api import Prometheus, fill_in, numbers
from tests.functional.promql import series_in
from tests.support.listeners import open_listeners
from tests.support.waiting import wait_for

from paceline.base.host.processes import command_line_of, pids_with_variable

pytestmark = [needs_prometheus, pytest.mark.functional]
INTERVAL_S = 0.5
# Slow steps, so that any machine trains for several scrapes: up to 5 s pass until Prometheus has
# found the sidecar of a trial.
STEPS, SLEEP_S = 90, 0.1
SPEC = (
    small(max_steps=STEPS, epochs=50, image_size=32, interval_s=INTERVAL_S)
    + trial("mpi", "mpi")
    + trial("spark", "gloo")
)
LAUNCHERS = ("local", "mpi", "spark")
# Without these a dashboard says little; others a host may lack (GPUs, sensors, limits).
ALWAYS = {
    "paceline_host_cpu_seconds_total",
    "paceline_host_memory_used_bytes",
    "paceline_run_info",
    "paceline_run_cpu_seconds_total",
    "paceline_run_threads",
    "paceline_rank_cpu_seconds_total",
    "paceline_rank_threads",
    "paceline_training_steps_total",
    "paceline_training_phase_seconds_total",
    "paceline_training_step_seconds_bucket",
    "paceline_training_loss",
    "paceline_sidecar_cpu_seconds_total",
}


class Scraped:
    """A run that Prometheus has scraped, and when each trial went."""

    def __init__(
        self,
        api: Prometheus,
        began: float,
        ended: float,
        listeners: set[tuple[str, str]],
        programs: set[str],
    ) -> None:
        self.api = api
        self.listeners, self.programs = listeners, programs
        infos = api.over('paceline_run_info{run="run"} == 1', began, ended)
        self.trials: dict[str, tuple[float, float]] = {}
        for info in infos:
            times = [at for at, _ in info["values"]]
            self.trials[info["metric"]["launcher"]] = (min(times), max(times))

    def names(self, launcher: str) -> set[str]:
        """Metrics that were there while the launcher's trial trained."""
        start, end = self.training(launcher)
        found = self.api.over('count by (__name__) ({__name__=~"paceline_.*"})', start, end)
        return {each["metric"]["__name__"] for each in found}

    def training(self, launcher: str) -> tuple[float, float]:
        """From its first steps to its last, as Prometheus saw it."""
        start, end = self.trials[launcher]
        expr = 'sum(paceline_training_steps_total{run="run"}) > 0'
        at = [when for each in self.api.over(expr, start, end) for when, _ in each["values"]]
        return min(at), max(at)


def watch_listeners(
    process: subprocess.Popen[bytes], mark: str
) -> tuple[set[tuple[str, str]], set[str]]:
    """Wait for the end of the run; return its listeners beyond loopback and all its programs."""
    listeners: set[tuple[str, str]] = set()
    programs: set[str] = set()
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None:
        assert time.monotonic() < deadline
        pids = pids_with_variable("TEST_SCRAPED_RUN", mark)
        listeners |= set(open_listeners(pids))
        programs |= {" ".join(command_line_of(pid)) for pid in pids}
        time.sleep(0.5)
    return listeners, programs


@pytest.fixture(scope="module")
def scraped(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("scraped")
    spec = folder / "small.toml"
    spec.write_text(SPEC)
    run_dir = folder / "run"
    cli = slowed(cli_in(cache, folder), SLEEP_S)
    cli.environment["TEST_SCRAPED_RUN"] = str(folder)
    log, began = folder / "run.log", time.time()
    process = cli.start("run", spec, "--out", run_dir, log=log)
    try:
        wait_for((run_dir / "manifest.json").exists, LIMIT_S, "a manifest", process)
        with monitored(run_dir) as monitor:
            api = monitor.api()
            listeners, programs = watch_listeners(process, str(folder))
            assert process.returncode == 0, log.read_text()
            yield Scraped(api, began, time.time(), listeners, programs)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60)


def test_no_process_of_the_run_listens_beyond_this_host(scraped) -> None:
    for part in (
        "paceline.measure.telemetry.sidecar",
        "mpi-jobs/train.py",
        "SparkSubmit",
        "pyspark.daemon",
    ):
        assert any(part in program for program in scraped.programs), part
    # mpirun's own control port cannot be bound to one interface: open-mpi/ompi#14441
    assert {name for name, _ in scraped.listeners} <= {"prterun", "mpirun"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sidecar_tells_what_no_dashboard_can_do_without(scraped, launcher) -> None:
    assert scraped.names(launcher) >= ALWAYS


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_dashboards_show_data_of_all_that_was_told(scraped, launcher) -> None:
    launched, _ = scraped.trials[launcher]  # annotations mark it
    _, end = scraped.training(launcher)
    # speedups need the baseline, which is the first trial
    first = min(start for start, _ in scraped.trials.values())
    told = scraped.names(launcher)
    alone = launcher == "local"
    asked: list[tuple[str, dict[str, Any]]] = [(n, t) for n, _, t in queries()]
    asked += [(a["name"], a) for a in DOCUMENTS["run"]["annotations"]["list"]]
    empty = []
    for name, target in asked:
        if not set(series_in(target["expr"])) <= told:
            continue
        if "Failure" in name or (alone and ("traggler" in name or "against the others" in name)):
            continue  # nothing failed; a single rank has no others
        expr = fill_in(target["expr"], run="run", range_s=round(end - first) + 5)
        if target.get("instant"):
            answer = scraped.api.instant(expr, end)
        else:
            answer = scraped.api.over(expr, launched, end)
        if not numbers(answer):
            empty.append((name, expr))
    assert empty == []
