from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.base.errors import UsageError
from paceline.cli import doctor
from paceline.runner.preflight.load import Load

FACTS = {
    "usable_cores": 16, "usable_physical_cores": 8, "ram_bytes": 64 * 2**30,
    "cpu_model": "EPYC", "kernel": "Linux 6",
}  # fmt: skip


@pytest.mark.parametrize(
    ("finding", "ok", "found", "why"),
    [
        (doctor._machine(FACTS), True, "16 cores (hardware threads of 8), 64 GiB", "EPYC"),
        (doctor._machine({**FACTS, "usable_physical_cores": 16}), True, "16 cores, 64 GiB", ""),
        (doctor._numa({"0": [0, 1, 2], "1": [3]}), True, "2 of 3, 1 cores", "if they fit"),
        (doctor._numa({}), True, "unknown", "does not report"),
        (doctor._gpus([], None), True, "none", ""),
        (doctor._gpus(["H200", "L4", "H200"], "13.0"), True, "2 x H200, 1 x L4", "CUDA 13.0"),
        (doctor._gpus(["L4"], None), False, "1 x L4", "install the same version's CUDA build"),
    ],
)
def test_machine_is_described(finding, ok, found, why):
    assert (finding.ok, finding.found) == (ok, found)
    assert why in finding.why


def test_busy_machine_lacks_nothing_but_is_said_to_be_busy():
    busy = Load(others_percent=50.0, stolen_percent=4.0, named={"cc1": 49.0})
    finding = doctor._load(busy)
    assert (finding.ok, finding.found) == (True, "54 % of the cores")
    assert "cc1 49 %" in finding.why
    assert "too low" in finding.why
    idle = doctor._load(Load(others_percent=1.0, stolen_percent=0.0, named={}))
    assert "too low" not in idle.why


def open_descriptors():
    return sorted(entry.name for entry in Path("/proc/self/fd").iterdir())


def test_processes_that_share_memory_are_found_to():
    before = open_descriptors()
    finding = doctor._shared_memory()
    assert (finding.ok, finding.found) == (True, "works"), finding.why
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (doctor._ATTACH.replace("argv[1]", "argv[1] + 'gone'"), "No such file"),
        ("", "did not arrive"),  # it wrote elsewhere
    ],
)
def test_processes_that_share_no_memory_are_told_why(monkeypatch, program, why):
    monkeypatch.setattr(doctor, "_ATTACH", program)
    finding = doctor._shared_memory()
    assert (finding.ok, finding.found) == (False, "fails")
    assert why in finding.why
    assert "gloo" in finding.why


def test_package_that_does_not_load_is_found_out_although_it_is_there(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such library')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._import_fault("broken") == "RuntimeError: no such library"
    assert doctor._import_fault("json") is None


def test_python_whose_torch_does_not_load_is_not_ready(monkeypatch):
    monkeypatch.setattr(doctor, "_import_fault", lambda _: "no torch_shm_manager")
    finding = doctor._python()
    assert not finding.ok
    assert "no torch_shm_manager" in finding.why


def test_hosts_with_slots_are_parsed():
    assert doctor.parse_hosts(["a", "b:4"]) == {"a": None, "b": 4}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "at least two hosts"),
        (["a", "a:2"], "a is given twice"),
        (["a", "b:x"], "'b:x'"),
        (["a", "b:0"], "'b:0'"),
        (["a", ":2"], "':2'"),
    ],
)
def test_wrong_hosts_are_refused(words, message):
    with pytest.raises(UsageError, match=message):
        doctor.parse_hosts(words)


def test_options_about_hosts_need_hosts():
    done = CliRunner().invoke(doctor.command, ["--link", "1gbit"], standalone_mode=False)
    assert isinstance(done.exception, UsageError)
    assert "expected --hosts" in str(done.exception)
