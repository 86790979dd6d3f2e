"""Checks of this host before a trial; those that launchers make are tested with the launchers."""

from __future__ import annotations

import pytest

from paceline.base.errors import EnvironmentLacks
from paceline.plan.spec.values import FailureSettings
from paceline.runner.preflight.this_host import check_lab


def test_hosts_are_killed_in_a_lab_only(make_trial):
    failures = FailureSettings(mean_s=1.0, kinds=("rank", "host"))
    trial = make_trial().model_copy(update={"failures": failures})
    check_lab([make_trial()], lambda: None)
    check_lab([trial], lambda: "lab")
    with pytest.raises(EnvironmentLacks, match="expects hosts of a lab"):
        check_lab([make_trial(), trial], lambda: None)
