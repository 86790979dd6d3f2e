"""Load of a machine before a training, from processes that are made up."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from paceline.base.errors import TimedOut
from paceline.measure.telemetry.host_reading import ProcessTime, read_processes
from paceline.runner.preflight import load as module
from paceline.runner.preflight.load import (
    Glance,
    Load,
    Looking,
    load_between,
    wait_until_idle,
)

# Two cores for one second, with nothing but idle time.
_IDLE = {
    "user": 0.0, "nice": 0.0, "system": 0.0, "idle": 2.0, "iowait": 0.0, "steal": 0.0, "other": 0.0
}  # fmt: skip
_NONE = dict.fromkeys(_IDLE, 0.0)


def process(name: str, cpu_s: float, *, is_ours: bool = False) -> ProcessTime:
    return ProcessTime(name=name, cpu_s=cpu_s, is_ours=is_ours)


def load(times: dict[str, float], *processes: ProcessTime) -> Load:
    """Return the load of one second in which these processes used their time."""
    began = {(n, 0.0): process(p.name, 5.0, is_ours=p.is_ours) for n, p in enumerate(processes)}
    ended = {
        (n, 0.0): process(p.name, 5.0 + p.cpu_s, is_ours=p.is_ours) for n, p in enumerate(processes)
    }
    before = Glance(cpu_seconds=_NONE, processes=began)
    return load_between(before, Glance(cpu_seconds={**_IDLE, **times}, processes=ended))


def test_idle_machine_disturbs_nothing():
    found = load({}, process("sshd", 0.0))
    assert not found.is_disturbing
    assert found.words == "other processes use 0 % of the cores"


def test_programs_are_named_by_their_share_the_largest_first():
    found = load(
        {"user": 0.5, "nice": 0.4, "system": 0.1, "idle": 1.0},
        process("make", 0.2), process("cc1", 0.4), process("cc1", 0.38), process("cat", 0.002),
    )  # fmt: skip
    assert found.is_disturbing
    assert found.words == "other processes use 50 % of the cores (cc1 39 %, make 10 %)"


def test_own_processes_are_no_load_however_busy():
    ours = [process("python", 1.2, is_ours=True), process("java", 0.8, is_ours=True)]
    found = load({"user": 2.0, "idle": 0.0}, *ours)
    assert found.others_percent == pytest.approx(0.0)
    assert not found.is_disturbing


def test_time_that_the_hypervisor_takes_counts():
    found = load({"steal": 0.5, "idle": 1.5})
    assert found.is_disturbing
    assert found.words.endswith("; the hypervisor gives 25 % to other machines")


def test_load_of_hidden_processes_is_seen_and_said():
    """In a container, the times of the cores are those of the host."""
    found = load({"user": 1.0, "idle": 1.0}, process("bash", 0.0))
    assert found.is_disturbing
    assert "(50 % by processes that have ended or are hidden)" in found.words


@pytest.mark.parametrize(("user_s", "is_disturbing"), [(0.2, False), (0.21, True)])
def test_limit_is_a_tenth_of_the_cores(user_s, is_disturbing):
    found = load({"user": user_s, "idle": 2 - user_s}, process("a", user_s))
    assert found.is_disturbing is is_disturbing


def test_process_that_began_meanwhile_counts_with_all_of_its_time():
    before = Glance(cpu_seconds=_NONE, processes={})
    after = Glance(
        cpu_seconds={**_IDLE, "user": 1.0, "idle": 1.0},
        processes={(7, 3.0): process("cc1", 1.0)},
    )
    assert load_between(before, after).named == {"cc1": pytest.approx(50.0)}


def test_a_machine_without_cpu_times_has_an_unknown_load():
    now = Glance(cpu_seconds=_NONE, processes={})
    found = load_between(now, now)
    assert not found.is_disturbing
    assert found.words == "what other processes use cannot be seen here"


def running(pid: int, parent: int, name: str) -> SimpleNamespace:
    times = SimpleNamespace(user=1.0, system=0.5, children_user=0.25, children_system=0.25)
    facts = {"pid": pid, "ppid": parent, "name": name, "cpu_times": times}
    return SimpleNamespace(info={**facts, "create_time": 0.0})


def test_ours_are_this_process_and_its_tree(monkeypatch):
    """Processes of other users may not show their times."""
    ours = os.getpid()
    unreadable = running(7, 1, "other user")
    unreadable.info["cpu_times"] = None
    found = [
        running(1, 0, "init"), running(ours, 1, "paceline"), running(20, ours, "mpirun"),
        running(21, 20, "rank"), running(30, 1, "cc1"), unreadable,
        running(40, 41, "circle"), running(41, 40, "circle"),
    ]  # fmt: skip
    monkeypatch.setattr(psutil, "process_iter", lambda _: found)
    seen = read_processes(os.getpid())
    assert {each.name for each in seen.values() if each.is_ours} == {"paceline", "mpirun", "rank"}
    others = {each.name for each in seen.values() if not each.is_ours}
    assert others == {"init", "cc1", "circle"}
    # what a preview of ours has waited for is ours as well
    assert {each.cpu_s for each in seen.values() if each.is_ours} == {2.0}
    assert {each.cpu_s for each in seen.values() if not each.is_ours} == {1.5}


def test_this_machine_can_be_looked_at(monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.2)
    found = Looking().end()
    assert 0.0 <= found.others_percent <= 100.0
    assert 0.0 <= found.stolen_percent <= 100.0


class Machine:
    """Is busy for some looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, busy_looks: int) -> None:
        self.now_s, self._busy_looks = 0.0, busy_looks
        monkeypatch.setattr(module, "Looking", lambda: self)
        monkeypatch.setattr(module, "time", self)

    def end(self) -> Load:
        self._busy_looks -= 1
        percent = 50.0 if self._busy_looks >= 0 else 1.0
        return Load(others_percent=percent, stolen_percent=0.0, named={"cc1": percent})

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_run_waits_until_the_machine_is_idle(monkeypatch):
    said = []
    machine = Machine(monkeypatch, busy_looks=3)
    wait_until_idle(60, said.append)
    assert machine.now_s == 6.0
    (line,) = said
    assert line.startswith("waits at most 60 s for an idle machine: other processes use 50 %")
    wait_until_idle(60, said.append)
    assert len(said) == 1


def test_waiting_for_an_idle_machine_has_an_end(monkeypatch):
    Machine(monkeypatch, busy_looks=1000)
    with pytest.raises(TimedOut, match=r"--when-idle: .* within 10 s, but .*cc1 50 %"):
        wait_until_idle(10, lambda _: None)


@pytest.mark.parametrize(("owner", "is_ours"), [(10, True), (30, False), (99, False)])
def test_processes_of_the_lab_that_we_are_in_are_ours(monkeypatch, owner, is_ours):
    """One that has ended, or that has not started us, is another one with its number."""
    ours = os.getpid()
    found = [
        running(1, 0, "init"), running(10, 1, "lab"), running(11, 10, "scheduler"),
        running(ours, 10, "paceline"), running(30, 1, "cc1"),
    ]  # fmt: skip
    monkeypatch.setattr(psutil, "process_iter", lambda _: found)
    seen = {each.name for each in read_processes(owner).values() if each.is_ours}
    assert seen == ({"lab", "scheduler", "paceline"} if is_ours else {"paceline"})
