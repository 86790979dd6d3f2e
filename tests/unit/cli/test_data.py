"""`paceline data`: the messages of an ingest, and what `inspect` prints."""

from __future__ import annotations

from types import SimpleNamespace

from paceline.base.errors import ExitCode
from paceline.cli import data, main


def test_ingest_says_what_it_does_and_what_it_wrote(monkeypatch, capsys) -> None:
    made = SimpleNamespace(
        summary="28 images",
        skipped=[SimpleNamespace(path="a/x.jpg", reason="it is truncated")],
    )
    monkeypatch.setattr(data, "ingest", lambda *_, **__: made)
    assert main(["data", "ingest", "images", "set"]) == ExitCode.OK
    shown = capsys.readouterr()
    assert shown.out == "set\n"
    assert shown.err.splitlines() == [
        "paceline: images: converting the images; Spark needs some seconds to start",
        "paceline: skipped a/x.jpg: it is truncated",
        'paceline: 28 images; use it in a spec with data = "set"',
    ]


def test_inspect_prints_yaml_without_what_is_empty(monkeypatch, output) -> None:
    skipped = [{"path": "ä.jpg", "reason": "empty"}]
    facts = {"samples": 2, "ignored": {}, "classes": {"a": 2, "b": None}, "skipped": skipped}
    monkeypatch.setattr(data, "inspect_dataset", lambda _: facts)
    assert output("data", "inspect", "set") == (
        "samples: 2\nclasses: {a: 2}\nskipped:\n- {path: ä.jpg, reason: empty}\n"
    )
