"""`paceline list` shows what is installed, and which package an extension comes from."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint

from paceline.cli import main
from paceline.cli.list import KINDS
from paceline.plan.spec import extensions
from paceline.plan.spec.descriptors import TransportDescriptor


class Pigeon(TransportDescriptor):
    """A transport of another package."""

    name = "pigeon"
    summary = "RFC 1149"


def test_every_name_has_a_line_of_its_own_in_80_columns(output, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = output("list").splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line in KINDS] == list(KINDS)
    first_words = [line.split()[0] for line in lines if line.startswith("  ")]
    for group in extensions.GROUPS.values():
        assert set(group.names()) <= set(first_words)


def test_json_names_the_package_of_an_extension(output, monkeypatch):
    point = EntryPoint("pigeon", f"{__name__}:Pigeon", "paceline.transports")
    group = extensions.ExtensionGroup("paceline.transports", TransportDescriptor, "transport")
    monkeypatch.setitem(extensions.GROUPS, "transports", group)
    monkeypatch.setattr(extensions, "installed_points", lambda _: [(point, "birds")])
    assert json.loads(output("list", "transports", "--json")) == {
        "schema": 2,
        "transports": [{"name": "pigeon", "summary": "RFC 1149", "package": "birds"}],
    }


def test_unknown_kind_is_wrong_use(capsys):
    assert main(["list", "planets"]) == 2
    assert "'planets' is not one of 'experiments', 'workloads'" in capsys.readouterr().err
