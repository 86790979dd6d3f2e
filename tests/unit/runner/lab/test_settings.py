from __future__ import annotations

import pytest

from paceline.base.errors import EnvironmentLacks, UsageError
from paceline.plan.spec.loading import load_spec
from paceline.runner.lab import LabSettings, why_not
from paceline.runner.lab.record import check_name, settings_for


@pytest.mark.parametrize("rate", ["", "fast", "1gbyte", "-1mbit", "0bit", "1kbit", "1G"])
def test_what_is_no_rate_or_too_small_a_one_is_refused(rate):
    with pytest.raises(UsageError, match="bandwidth: expected"):
        LabSettings(bandwidth=rate).check()


@pytest.mark.parametrize(
    "settings", [LabSettings(hosts=0), LabSettings(hosts=65), LabSettings(cores=0),
                 LabSettings(slots=-1)],
)  # fmt: skip
def test_counts_that_make_no_lab_are_refused(settings):
    with pytest.raises(UsageError, match="expected"):
        settings.check()


def test_hosts_get_cores_of_their_own_in_order():
    settings = LabSettings(hosts=3, cores=2)
    here = [1, 3, 4, 5, 8, 9, 11]
    assert [settings.cores_of(n, here) for n in range(3)] == [[1, 3], [4, 5], [8, 9]]


def test_hosts_share_all_cores_unless_told_otherwise():
    assert LabSettings(hosts=3).cores_of(2, [0, 1]) == []


def test_more_cores_than_there_are_are_lacking():
    with pytest.raises(EnvironmentLacks, match=r"2 hosts with 2 cores each needs 4, .* use 3"):
        LabSettings(hosts=2, cores=2).cores_of(0, [0, 1, 2])


def test_slots_are_those_asked_for_else_cores():
    assert LabSettings(cores=2, slots=5).slots_per_host() == 5
    assert LabSettings(cores=2).slots_per_host() == 2


@pytest.mark.parametrize("name", ["", "Lab", "1lab", "a.b", "a/b", "a b", "x" * 32, "-a"])
def test_names_that_cannot_be_part_of_a_host_name_are_refused(name):
    with pytest.raises(UsageError, match="name of a lab"):
        check_name(name)


def test_no_lab_is_made_on_a_host_of_a_lab(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PACELINE_LAB", "outer")
    assert "host of lab outer" in str(why_not())


def test_names_of_letters_digits_and_dashes_are_taken():
    check_name("lab-2")


@pytest.mark.parametrize(("here", "turns"), [(2, True), (4, False)])
def test_lab_of_an_experiment_has_the_hosts_of_its_largest_trial(here: int, turns: bool) -> None:
    trials = load_spec("local-global").experiment.trials
    found = settings_for(trials, cores=2, bandwidth="1gbit", slice_ms=5, here=here)
    assert (found.hosts, found.turns, found.spark) == (2, turns, True)
    found.check()
    alone = settings_for(trials[:6], cores=2, bandwidth="1gbit", slice_ms=5, here=1)
    assert (alone.hosts, alone.turns, alone.spark) == (1, False, False)
