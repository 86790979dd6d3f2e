"""State that a search keeps while its trials run one after the other."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from paceline.errors import NotComparable
from paceline.tune import session
from paceline.tune.local import tune_local

SPEC = """
schema = 1
name = "mine"
[[workloads]]
name = "tiny"
[[trials]]
launcher = "local"
local_strategy = "sequential"
[tune]
strategies = ["sequential"]
[telemetry]
interval_s = 0.5
"""


class Measurer:
    """Replaces TrialMeasurer: records calls, and has no time for any trial."""

    events: list[object]

    def __init__(self, *_, **__): ...

    def measure(self, trial, number, of):
        self.events.append("trial")


class Watcher:
    def stage(self, text): ...
    def data(self, done, total): ...
    def trial_started(self, trial, files, number, of): ...
    def trial_ended(self, trial, outcome): ...


def test_one_sampler_is_kept_over_all_trials_of_a_search(tmp_path, monkeypatch):
    Measurer.events = events = []

    @contextmanager
    def kept(files, settings):
        events.append((files.root, settings.interval_s))
        try:
            yield
        finally:
            events.append("let go")

    monkeypatch.setattr(session, "kept_sampler", kept)
    monkeypatch.setattr(session, "TrialMeasurer", Measurer)
    monkeypatch.setattr(session, "make_datasets", lambda *_: {"tiny": tmp_path})
    monkeypatch.setattr(session, "preflight", list)
    spec = tmp_path / "search.toml"
    spec.write_text(SPEC)
    with pytest.raises(NotComparable):
        tune_local(str(spec), tmp_path / "found", resume=False, progress=Watcher())
    assert events == [(tmp_path / "found", 0.5), "trial", "let go"]
