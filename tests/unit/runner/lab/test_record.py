from __future__ import annotations

from pathlib import Path

import pytest

from paceline.base.errors import UsageError
from paceline.runner.lab import LabSettings
from paceline.runner.lab.record import Registry, hosts_of, namespaces_among
from paceline.runner.lab.session import Lab


def test_namespaces_of_a_lab_are_told_from_those_of_labs_with_longer_names():
    names = [
        "paceline-a-hub", "paceline-a-0", "paceline-a-11", "paceline-a-0-hub", "paceline-a-0-1",
        "paceline-aa-0", "paceline-a-0x", "other",
    ]  # fmt: skip
    assert namespaces_among(names, "a") == ["paceline-a-hub", "paceline-a-0", "paceline-a-11"]
    assert namespaces_among(names, "a-0") == ["paceline-a-0-hub", "paceline-a-0-1"]


def test_hosts_differ_in_all_that_must_not_be_shared():
    made = hosts_of("x", LabSettings(hosts=64, cores=1), Path("/f"), list(range(64)))
    for field in ("name", "address", "namespace", "folder"):
        assert len({getattr(host, field) for host in made}) == 64, field
    assert made[63].address == "10.77.0.64"
    assert made[2].name == "x-2"


def test_record_is_read_back_as_it_was_kept(tmp_path):
    registry = Registry(tmp_path / "labs")
    lab = Lab(LabSettings(hosts=2, bandwidth="1gbit", spark=True), name="kept")
    with registry.locked():
        registry.save(lab.record)
    assert registry.names() == ["kept"]
    assert registry.load("kept") == lab.record
    registry.forget("kept")
    assert registry.load("kept") is None


@pytest.mark.parametrize(("asked", "number"), [("1", 1), ("some-0", 0)])
def test_hosts_are_found_by_number_and_by_name(asked, number):
    assert Lab(name="some").record.host(asked).number == number


def test_host_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(UsageError, match="some-0, some-1, got '2'"):
        Lab(name="some").record.host("2")


def test_master_of_a_lab_without_spark_is_refused():
    with pytest.raises(UsageError, match="has no Spark"):
        _ = Lab().spark_master
    assert Lab(LabSettings(spark=True)).spark_master == "spark://10.77.0.1:7077"
