"""Checks of this host before a trial; those that launchers make are tested with the launchers."""

from __future__ import annotations

import pytest

from paceline.base.errors import EnvironmentLacks
from paceline.collectives import host
from paceline.plan.spec.values import FailureSettings
from paceline.runner.preflight.this_host import check_lab, check_trial


def test_hosts_are_killed_in_a_lab_only(make_trial):
    failures = FailureSettings(mean_s=1.0, kinds=("rank", "host"))
    trial = make_trial().model_copy(update={"failures": failures})
    check_lab([make_trial()], lambda: None)
    check_lab([trial], lambda: "lab")
    with pytest.raises(EnvironmentLacks, match="expects hosts of a lab"):
        check_lab([make_trial(), trial], lambda: None)


def test_ranks_without_an_address_to_meet_at_are_refused_before_they_start(
    make_trial, tmp_path, monkeypatch
):
    """The host has IPv6 only, or its `lo` is down."""
    monkeypatch.setattr(host, "_ask_interface", lambda _name, _request: None)
    check_trial(make_trial(dataset=str(tmp_path)))
    trial = make_trial(ranks=2, dataset=str(tmp_path))
    with pytest.raises(EnvironmentLacks, match=r"interface 'lo' .* expected one with an IPv4"):
        check_trial(trial)
