"""Settings and arithmetic of hosts that take turns, with folders in place of control groups."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from paceline.base.errors import EnvironmentLacks, TimedOut, UsageError
from paceline.measure.records.virtual_clock import Slice
from paceline.runner.lab import LabSettings, turns
from paceline.runner.trials.run_trial import slowed

MS = 1_000_000


def settings(**changes):
    return LabSettings(**{"turns": True, "cores": 2, "bandwidth": "1gbit", **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cores": None}, "a number of cores"),
        ({"bandwidth": None}, "cannot be slowed"),
        ({"hosts": 1}, "at least 2 hosts"),
        ({"slice_ms": 0}, "expected 1 to 20 ms"),
        ({"slice_ms": 21}, "expected 1 to 20 ms"),
    ],
)
def test_turns_that_cannot_be_are_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        settings(**changes).check()


def test_all_hosts_have_the_same_cores_and_time_runs_slower():
    four = settings(hosts=4)
    four.check()
    assert [four.cores_of(number, [1, 3, 5]) for number in range(4)] == [[1, 3]] * 4
    assert (four.dilation, LabSettings(hosts=4).dilation) == (4, 1)


def test_links_are_slowed_for_the_time_of_a_change_too():
    assert [settings(hosts=4, slice_ms=ms).link_slowdown for ms in (1, 5)] == [5.0, 4.2]
    assert LabSettings(hosts=4).link_slowdown == 1.0


def test_a_change_takes_its_time_on_average():
    due_ns, end_ns, starts = 0, 7 * MS, []
    for change_ms in (0, 0.125, 0.5, 0.125, 0.125, 3, 0.125):
        start_ns = max(due_ns, end_ns + round(change_ms * MS))
        end_ns = start_ns + 2 * MS
        starts.append(start_ns / MS)
        due_ns = turns.next_due_ns(due_ns, Slice(start_ns, end_ns), 2 * MS)
    assert starts == [7, 9.25, 11.75, 13.875, 16, 21, 23.25]


def test_a_host_with_more_cores_than_there_are_is_refused():
    with pytest.raises(EnvironmentLacks, match="2 cores was requested, this process may use 1"):
        settings().cores_of(0, [0])


@pytest.mark.parametrize(
    ("ran_ms", "turn", "length_ms"),
    [
        (0, 0, 10),
        (10, 1, 10),
        (14, 1, 6),  # its last slice ended late
        (30, 1, 2.5),  # much too late: it still runs a little
        (18, 2, 12),  # it ended early
    ],
)
def test_slices_keep_the_clocks_of_all_hosts_together(ran_ms, turn, length_ms):
    assert turns.length_ns(ran_ms * MS, turn, 10 * MS) == length_ms * MS


@pytest.fixture(params=[1, 2])
def group(request, tmp_path):
    make_files(tmp_path)
    return turns.FreezerGroup(tmp_path, request.param)


def make_files(folder):
    (folder / "freezer.state").write_text("THAWED\n")
    (folder / "cgroup.freeze").write_text("0\n")
    (folder / "cgroup.events").write_text("frozen 0\n")
    for name in ("tasks", "cgroup.threads"):
        (folder / name).write_text(f"{os.getpid()}\n")


def test_group_that_does_not_freeze_is_an_error(group, monkeypatch):
    monkeypatch.setattr(turns, "_FREEZE_S", 0.01)
    monkeypatch.setattr(turns.Switch, "is_frozen", lambda _: False)
    with pytest.raises(TimedOut, match=rf"not frozen after 0.01 s: .* \({os.getpid()}\) in "):
        group.freeze()


def test_group_that_the_kernel_cannot_freeze_runs_for_a_moment_and_is_frozen_again(group):
    class Stuck(turns.Switch):
        thawed = False

        def thaw(self):
            self.thawed = True
            return super().thaw()

        def is_frozen(self):
            return self.thawed

    with closing(Stuck(group)) as switch:
        before_ns = time.monotonic_ns()
        ended_ns = switch.freeze()
    assert ended_ns > before_ns + 0.02e9
    state = group.folder / {1: "freezer.state", 2: "cgroup.freeze"}[group.version]
    assert state.read_text().startswith(("FROZEN", "1"))


def test_scheduler_reports_while_a_process_waits_for_a_disk(tmp_path):
    group, waited = turns.FreezerGroup(tmp_path, 2), []
    make_files(tmp_path)
    events = tmp_path / "cgroup.events"

    def waiting():
        waited.append(True)
        if len(waited) == 3:
            events.write_text("frozen 1\n")

    with closing(turns.Switch(group)) as switch:
        switch.freeze(waiting)
    assert len(waited) == 3


def test_hosts_that_run_at_once_have_slices_that_begin_together(tmp_path):
    switches = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_files(tmp_path / name)
        (tmp_path / name / "freezer.state").write_text("FROZEN\n")
        switches.append(turns.Switch(turns.FreezerGroup(tmp_path / name, 1)))
    looks = iter([True, True, False])
    seen = []

    def goes_on():
        seen.append([switch.is_frozen() for switch in switches])
        return next(looks)

    slices = turns._run_together(switches, goes_on, lambda: None)
    for switch in switches:
        assert switch.is_frozen()
        switch.close()
    assert seen == [[False, False]] * 3
    assert len({each.start_ns for each in slices}) == 1
    assert slices[0].start_ns < slices[0].end_ns <= slices[1].end_ns


def test_group_stands_still_when_the_kernel_says_so(group):
    state = {1: ("freezer.state", "FROZEN\n"), 2: ("cgroup.events", "populated 1\nfrozen 1\n")}
    name, text = state[group.version]
    assert not group.is_frozen()
    (group.folder / name).write_text(text)
    assert group.is_frozen()


def test_no_freezer_is_lacking_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "_CONTROL_GROUPS", tmp_path)
    assert "expected the freezer of control groups" in str(turns.why_no_turns())


def test_limits_and_samples_of_a_trial_wait_for_slower_time(make_trial):
    trial = make_trial()
    limits, telemetry = trial.limits, trial.telemetry
    found = slowed(trial, 4)
    assert found.limits.collective_s == 4 * limits.collective_s
    assert found.limits.trial_s == 4 * limits.trial_s
    assert found.telemetry.interval_s == min(10, 4 * telemetry.interval_s)
    assert found.id == trial.id
    assert type(trial).model_validate_json(slowed(trial, 64).model_dump_json()).id == trial.id
    assert slowed(trial, 1) is trial


def test_processes_join_the_group_of_the_freezer_and_that_of_the_cpu_time(monkeypatch, tmp_path):
    freezer, accounting = Path("/groups/freezer"), Path("/groups/cpuacct")
    monkeypatch.setattr(turns, "_freezer", lambda: (freezer, 1, accounting))
    script = turns.joining(tmp_path / "guardian", "paceline-l-0")
    root = f'"/proc/$(cat {tmp_path}/guardian)/root"'
    assert script.splitlines() == [
        f"echo $$ > {root}/groups/freezer/paceline-l-0/cgroup.procs || exit 1",
        f"echo $$ > {root}/groups/cpuacct/paceline-l-0/cgroup.procs || exit 1",
        f"export PACELINE_LAB_CPU_TIME={root}/groups/cpuacct/paceline-l-0/cpuacct.usage",
    ]


def test_version_2_has_one_group_for_both(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "_freezer", lambda: (tmp_path, 2, tmp_path))
    [group] = turns.groups_of(["paceline-l-0"])
    assert group.folders == (tmp_path / "paceline-l-0",)
    assert group.cpu_time == tmp_path / "paceline-l-0/cpu.stat"
