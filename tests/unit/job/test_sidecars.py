"""What is asked of a host's sampler for a trial, and by whom."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.host.machine import host_name
from paceline.job import sidecars
from paceline.job.environment import SIDECAR_HOST_VARIABLE
from paceline.plan.planning import plan_trials
from paceline.records.layout import RunFiles
from paceline.spec.loading import parse_spec

if TYPE_CHECKING:
    from paceline.plan.trial import Trial
    from paceline.telemetry import SidecarOptions

SPEC = """
schema = 1
name = "small"
repeats = 1
[[workloads]]
name = "tiny"
[telemetry]
interval_s = 0.5
listen_port = {port}
enabled = {enabled}
targets_dir = "targets-of-all"
textfile_dir = "text"
bearer_token_file = "token"
[[trials]]
launcher = "local"
local_strategy = "sequential"
"""


def trial_of(port: int = 9464, enabled: bool = True) -> Trial:
    spec = SPEC.format(port=port, enabled=str(enabled).lower())
    return plan_trials(parse_spec(spec, "spec"), {"tiny": "/data"}, 2)[0]


class Watches:
    """Stands in for start_sidecar."""

    def __init__(self) -> None:
        self.asked: list[SidecarOptions] = []
        self.stopped = 0
        self.works = True

    def __call__(self, options: SidecarOptions) -> Any:
        self.asked.append(options)
        return SimpleNamespace(stop=self._stop) if self.works else None

    def _stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Watches:
    found = Watches()
    monkeypatch.setattr(sidecars, "start_sidecar", found)
    monkeypatch.delenv(SIDECAR_HOST_VARIABLE, raising=False)
    return found


def test_watch_of_a_trial_says_what_runs_and_where_its_files_are(
    watches: Watches, tmp_path: Path
) -> None:
    run, trial = RunFiles(tmp_path / "my-run"), trial_of()
    files = run.trial(trial.id)
    assert len(sidecars.watch(trial, files, "h", [7])) == 1
    (asked,) = watches.asked
    assert (asked.pids, asked.run, asked.interval_s) == ((7,), "my-run", 0.5)
    assert (asked.out, asked.state) == (files.host("h").trace, files.host("h").sidecar)
    assert (asked.trial_root, asked.run_targets) == (files.root, run.targets)
    assert (asked.listen_host, asked.listen_port) == ("127.0.0.1", 9464)
    assert (asked.targets_dirs, asked.textfile_dir) == ((Path("targets-of-all"),), Path("text"))
    assert (asked.bearer_token_file, asked.tls_key) == (Path("token"), None)
    assert asked.info == {
        "trial": trial.id,
        "workload": "tiny",
        "launcher": "local",
        "transport": "none",
        "local_strategy": "sequential",
        "nodes": "1",
        "ranks": "1",
        "repeat": "0",
    }
    assert not asked.ends_with_caller


def test_no_metrics_and_no_telemetry_are_respected(watches: Watches, tmp_path: Path) -> None:
    files = RunFiles(tmp_path).trial("t")
    sidecars.watch(trial_of(port=-1), files, "h", [7])
    assert watches.asked[0].listen_port is None
    assert sidecars.watch(trial_of(enabled=False), files, "h", [7]) == []
    with sidecars.kept_sampler(RunFiles(tmp_path), trial_of(enabled=False).telemetry):
        pass
    assert len(watches.asked) == 1


def test_watch_that_does_not_begin_is_no_error(watches: Watches, tmp_path: Path) -> None:
    watches.works = False
    run = RunFiles(tmp_path)
    assert sidecars.watch(trial_of(), run.trial("t"), "h", [7]) == []
    with sidecars.kept_sampler(run, trial_of().telemetry):
        pass
    assert watches.stopped == 0


def test_sampler_is_kept_for_a_run_without_a_trace_of_its_own(
    watches: Watches, tmp_path: Path
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        sidecars.kept_sampler(RunFiles(tmp_path / "r"), trial_of().telemetry),
    ):
        raise ZeroDivisionError
    (asked,) = watches.asked
    assert (asked.out, asked.pids, asked.ends_with_caller) == (None, (os.getpid(),), True)
    assert (asked.run, asked.run_targets) == ("r", tmp_path / "r" / "targets")
    assert watches.stopped == 1


def test_watches_of_a_run_agree_on_its_directory_whatever_link_led_there(
    watches: Watches, tmp_path: Path
) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "r")
    with sidecars.kept_sampler(RunFiles(tmp_path / "latest"), trial_of().telemetry):
        sidecars.watch(trial_of(), RunFiles(tmp_path / "r").trial("t"), "h", [7])
    assert [asked.run_targets for asked in watches.asked] == [tmp_path / "r" / "targets"] * 2


def rank(tmp_path: Path, local_rank: int = 0) -> tuple[Any, Any]:
    job = SimpleNamespace(trial=trial_of(), files=RunFiles(tmp_path / "r").trial("t"))
    return job, SimpleNamespace(local_rank=local_rank, host=host_name())


def test_first_rank_of_a_host_that_nobody_watches_sees_to_it(
    watches: Watches, tmp_path: Path
) -> None:
    with sidecars.host_sidecar(*rank(tmp_path), watched_pids=(5, 6)):
        assert [asked.pids for asked in watches.asked] == [(5, 6)]
        assert watches.stopped == 0
    assert watches.stopped == 1
    with sidecars.host_sidecar(*rank(tmp_path), watched_pids=()):
        assert watches.asked[-1].pids == (os.getpid(),)


@pytest.mark.parametrize("reason", ["not first", "runner does", "somebody does"])
def test_host_that_is_watched_already_is_left_alone(
    watches: Watches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "runner does":
        monkeypatch.setenv(SIDECAR_HOST_VARIABLE, host_name())
    monkeypatch.setattr(sidecars, "sidecar_is_alive", lambda _: reason == "somebody does")
    with sidecars.host_sidecar(*rank(tmp_path, int(reason == "not first")), watched_pids=()):
        pass
    assert watches.asked == []
