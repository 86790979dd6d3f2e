"""Requests to the sidecars of a trial, and who starts them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.specs import spec_text

from paceline.collectives.host import host_name
from paceline.measure.records.layout import RunFiles
from paceline.measure.telemetry import SidecarRequest
from paceline.plan.spec.loading import parse_spec
from paceline.plan.trials.planning import plan_trials
from paceline.plan.trials.trial import Trial
from paceline.runner.job import rank as sidecars
from paceline.runner.job.context import SIDECAR_HOST_VARIABLE

TELEMETRY = (
    '[telemetry]; interval_s = 0.5; targets_dir = "targets-of-all"; textfile_dir = "text"; '
    'bearer_token_file = "token"'
)


def trial_of(port: int = 9464, enabled: bool = True) -> Trial:
    tables = f"{TELEMETRY}; listen_port = {port}; enabled = {str(enabled).lower()}"
    spec = spec_text(tables=tables, name="small", repeats=1)
    return plan_trials(parse_spec(spec, "spec"), {"tiny": "/data"}, 2)[0]


class Watches:
    """Stands in for start_sidecar."""

    def __init__(self) -> None:
        self.requests: list[SidecarRequest] = []
        self.stopped = 0
        self.works = True

    def __call__(self, request: SidecarRequest) -> Any:
        self.requests.append(request)
        return SimpleNamespace(stop=self._stop) if self.works else None

    def _stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Watches:
    found = Watches()
    monkeypatch.setattr(sidecars, "start_sidecar", found)
    monkeypatch.delenv(SIDECAR_HOST_VARIABLE, raising=False)
    return found


def test_request_of_a_trial_has_its_settings_facts_and_files(
    watches: Watches, tmp_path: Path
) -> None:
    run, trial = RunFiles(tmp_path / "my-run"), trial_of()
    files = run.trial(trial.id)
    assert len(sidecars.watch(trial, files, "h", [7])) == 1
    (request,) = watches.requests
    assert request.settings == trial.telemetry
    assert request.settings.listen_port == 9464
    assert (request.pids, request.run, request.replicas) == ((7,), "my-run", 1)
    assert (request.trace, request.state) == (files.host("h").trace, files.host("h").sidecar)
    assert (request.trial_root, request.run_targets) == (files.root, run.targets)
    assert request.facts == {
        "trial": trial.id,
        "workload": "tiny",
        "launcher": "local",
        "transport": "none",
        "local_strategy": "sequential",
        "nodes": "1",
        "ranks": "1",
        "repeat": "0",
    }


def test_sidecar_gets_the_cores_of_the_launcher(
    watches: Watches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecars, "launching_pid", lambda: 7)
    cores = {7: {2, 1}}  # as taskset -c 1,2 gave them; the rank has core 2
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: cores[pid])
    sidecars.watch(trial_of(), RunFiles(tmp_path).trial("t"), "h", [7])
    [request] = watches.requests
    assert request.cores == (1, 2)


def test_trial_without_telemetry_has_no_sidecar(watches: Watches, tmp_path: Path) -> None:
    files = RunFiles(tmp_path).trial("t")
    assert sidecars.watch(trial_of(enabled=False), files, "h", [7]) == []
    assert watches.requests == []


def test_sidecar_that_does_not_start_is_no_error(watches: Watches, tmp_path: Path) -> None:
    watches.works = False
    assert sidecars.watch(trial_of(), RunFiles(tmp_path).trial("t"), "h", [7]) == []


def test_sidecars_of_a_run_agree_on_its_directory_whatever_link_led_there(
    watches: Watches, tmp_path: Path
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "r")
    for name in ("latest", "r"):
        sidecars.watch(trial_of(), RunFiles(tmp_path / name).trial("t"), "h", [7])
    targets = [request.run_targets for request in watches.requests]
    assert targets == [tmp_path / "r" / "targets"] * 2
    assert watches.requests[0].ports("h") == watches.requests[1].ports("h")


def rank(tmp_path: Path, local_rank: int = 0) -> tuple[Any, Any]:
    job = SimpleNamespace(trial=trial_of(), files=RunFiles(tmp_path / "r").trial("t"))
    return job, SimpleNamespace(local_rank=local_rank, host=host_name())


def test_first_rank_of_a_host_without_a_sidecar_starts_one(
    watches: Watches, tmp_path: Path
) -> None:
    with sidecars.host_sidecar(*rank(tmp_path), watched_pids=(5, 6)):
        assert [request.pids for request in watches.requests] == [(5, 6)]
        assert watches.stopped == 0
    assert watches.stopped == 1
    with sidecars.host_sidecar(*rank(tmp_path), watched_pids=()):
        assert watches.requests[-1].pids == (os.getpid(),)


@pytest.mark.parametrize("reason", ["not first", "runner does", "somebody does"])
def test_host_with_a_sidecar_gets_no_second_one(
    watches: Watches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "runner does":
        monkeypatch.setenv(SIDECAR_HOST_VARIABLE, host_name())
    monkeypatch.setattr(sidecars, "sidecar_is_alive", lambda _: reason == "somebody does")
    with sidecars.host_sidecar(*rank(tmp_path, int(reason == "not first")), watched_pids=()):
        pass
    assert watches.requests == []
