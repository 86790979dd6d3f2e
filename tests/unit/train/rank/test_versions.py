"""Hosts with other versions are refused when the ranks meet."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.base.errors import EnvironmentLacks
from paceline.base.version import __version__
from paceline.train.rank import peers
from paceline.train.rank.peers import check_versions, join_peers, own_versions

OTHER = json.dumps({"Paceline": __version__, "torch": "2.9.0"})


def test_equal_versions_are_accepted():
    check_versions(["a", "a", "b"], [own_versions()] * 3)


def test_hosts_with_another_version_are_named():
    with pytest.raises(EnvironmentLacks) as error:
        check_versions(["a", "b", "b", "c"], [own_versions(), OTHER, OTHER, own_versions()])
    assert f"torch {torch.__version__} on a and c, 2.9.0 on b; install" in str(error.value)
    assert "Paceline" not in str(error.value).partition(";")[0]


def test_ranks_compare_their_versions_when_they_meet(make_trial, context_of, monkeypatch):
    answers = {"world/hosts": ["a", "b"], "world/versions": [own_versions(), OTHER]}
    monkeypatch.setattr(peers, "open_store", lambda _context, _limit_s: object())
    monkeypatch.setattr(peers, "store_barrier", lambda *_: None)
    monkeypatch.setattr(peers, "gather", lambda group, _value, _limit_s: answers[group.prefix])
    with pytest.raises(EnvironmentLacks, match=r"2\.9\.0 on b"):
        join_peers(context_of(1, 2), make_trial(ranks=2))
