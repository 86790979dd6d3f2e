"""Hosts that take turns: only one runs at a time, and nothing stays frozen."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.cluster.lab.labs import checked_lab
from tests.support.commands import run_command

from paceline.analysis.trial.reading import load_trial
from paceline.analysis.trial_analysis import analyse_trial
from paceline.base.errors import EnvironmentLacks, ExitCode
from paceline.base.host.processes import pids_with_variable, send
from paceline.collectives.host import wait_until
from paceline.measure.records.layout import RunFiles
from paceline.measure.records.virtual_clock import RecordedSlices, overlap_ns
from paceline.runner.lab import Lab, LabSettings, turns
from paceline.runner.lab.record import NAME_VARIABLE
from paceline.runner.lab.session import check_turns
from paceline.runner.lab.turns import TURNS_VARIABLE, groups_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.needs("lab"),
    pytest.mark.skipif(turns.why_no_turns() is not None, reason="no writable freezer"),
]

LIMIT_S = 60
TRAINING_S = 150
SETTINGS = LabSettings(hosts=2, cores=1, bandwidth="1gbit", turns=True, slice_ms=5)
BUSY = "import time; e = time.monotonic() + 1\nwhile time.monotonic() < e: pass\n"
BUSY += "print(open('/proc/self/cgroup').read())"


SPEC = """
schema = 2
name = "turns"
repeats = 1
[training]
max_steps = 4
warmup_steps = 1
[[workloads]]
name = "tiny"
samples = 64
image_size = 224
global_batch = 64
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
launcher = "mpi"
transport = "mpi"
local_strategy = "sequential"
nodes = 2
[network]
interface = "eth0"
[mpi]
hostfile = "{hostfile}"
[limits]
collective_s = 50.0
"""


def scheduler_and_guardian(lab: Lab) -> tuple[int, int]:
    guardian = int(lab.record.guardian.read_text())
    [scheduler] = pids_with_variable(TURNS_VARIABLE, lab.record.name) - {guardian}
    return scheduler, guardian


def frozen(lab: Lab) -> list[str]:
    return [g.folder.name for g in groups_of(lab.record.groups) if g.is_frozen()]


def test_one_host_runs_at_a_time_with_all_its_processes(tmp_path: Path) -> None:
    with checked_lab(SETTINGS, logs=tmp_path) as lab:
        started = [
            subprocess.Popen(host.command(sys.executable, "-c", BUSY), stdout=subprocess.PIPE)
            for host in lab.hosts
        ]
        said = [process.communicate(timeout=LIMIT_S)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    for host, text in zip(lab.hosts, said, strict=True):
        assert f"/{host.namespace}\n" in text
    clocks = RecordedSlices.read(lab.record.slices).clocks()
    assert overlap_ns(clocks.values()) == 0
    assert all(len(clock.slices) > 50 for clock in clocks.values())
    assert not any(group.folder.exists() for group in groups_of(lab.record.groups))


def test_two_hosts_train_in_turns(tmp_path: Path) -> None:
    spec, run = tmp_path / "turns.toml", tmp_path / "run"
    with checked_lab(SETTINGS, logs=tmp_path / "logs") as lab:
        spec.write_text(SPEC.format(hostfile=lab.hostfile))
        command = lab.hosts[0].command(sys.executable, "-m", "paceline.cli", "run", spec)
        done = run_command([*command, "--out", run], TRAINING_S)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "took turns" in done.stdout + done.stderr
    for _, files in RunFiles(run).trials():
        record = load_trial(files)
        clocks = RecordedSlices.read(files.slices).clocks()
        assert overlap_ns(clocks.values()) == 0
        begun = Counter(each.start_ns for clock in clocks.values() for each in clock.slices)
        assert set(begun.values()) == {1, 2}  # in turns, and while the trial started
        assert record.dilation == 2
        assert record.outcome is not None
        whole_s = record.outcome.ended_unix_s - record.outcome.launched_unix_s
        found = analyse_trial(record, None)
        assert 0 < found.steps.time_s.sum() < whole_s
        assert found.usage.cpu_percent is not None
        assert 50 < found.usage.cpu_percent < 110
        assert found.usage.iowait_percent is None
        assert found.usage.context_switches_per_s is None
        assert found.time_to_first_step_s is None
    assert record.trial.limits.collective_s == 100


def test_short_steps_are_refused(tmp_path: Path) -> None:
    spec = tmp_path / "turns.toml"
    with checked_lab(SETTINGS, logs=tmp_path / "logs") as lab:
        [local, _] = SPEC.format(hostfile=lab.hostfile).split('[[trials]]\nlauncher = "mpi"')
        spec.write_text(local.replace("global_batch = 64", "global_batch = 2"))
        command = lab.hosts[0].command(sys.executable, "-m", "paceline.cli", "run", spec)
        done = run_command([*command, "--out", tmp_path / "run"], TRAINING_S)
    assert done.returncode == ExitCode.DATA
    assert "rounds of slices, expected at least 20" in done.stdout + done.stderr


def test_process_is_told_when_its_hosts_take_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    with checked_lab(SETTINGS) as lab:
        monkeypatch.setenv(NAME_VARIABLE, lab.record.name)
        check_turns()
        send([scheduler_and_guardian(lab)[0]], signal.SIGKILL)
        assert wait_until(lambda: not turns.are_taken(lab.record.name), 10)
        with pytest.raises(EnvironmentLacks, match="all hosts run at once; make the lab again"):
            check_turns()


@pytest.mark.parametrize("which", [0, 1], ids=["scheduler", "guardian"])
def test_nothing_stays_frozen_when_one_is_killed(which: int) -> None:
    with checked_lab(SETTINGS) as lab:
        sleeper = subprocess.Popen(lab.hosts[1].command("sleep", "60"))
        both = scheduler_and_guardian(lab)
        send([both[which]], signal.SIGKILL)
        assert wait_until(lambda: not pids_with_variable(TURNS_VARIABLE, lab.record.name), 2)
        assert frozen(lab) == []
    assert sleeper.wait(timeout=LIMIT_S) != 0


def test_stopped_scheduler_is_replaced_by_hosts_that_run() -> None:
    with checked_lab(SETTINGS) as lab:
        scheduler, _ = scheduler_and_guardian(lab)
        send([scheduler], signal.SIGSTOP)
        assert wait_until(lambda: not pids_with_variable(TURNS_VARIABLE, lab.record.name), 10)
        assert frozen(lab) == []


def test_removal_ends_frozen_processes_though_both_were_killed() -> None:
    with checked_lab(SETTINGS) as lab:
        sleeper = subprocess.Popen(lab.hosts[1].command("sleep", "60"))
        send(scheduler_and_guardian(lab)[::-1], signal.SIGKILL)
        for group in groups_of(lab.record.groups):
            group.freeze()
    assert sleeper.wait(timeout=LIMIT_S) != 0
