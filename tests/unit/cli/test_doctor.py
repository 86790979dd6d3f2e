from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import doctor


def test_machine_says_which_cores_are_hardware_threads():
    facts = {
        "usable_cores": 16, "usable_physical_cores": 8, "ram_bytes": 64 * 2**30,
        "cpu_model": "EPYC", "kernel": "Linux 6",
    }  # fmt: skip
    assert doctor._machine(facts).found == "16 cores (hardware threads of 8), 64 GiB"
    assert doctor._machine({**facts, "usable_physical_cores": 16}).found == "16 cores, 64 GiB"


@pytest.mark.parametrize(
    ("numa", "found"),
    [({"0": [0, 1, 2], "1": [3]}, "2 of 3, 1 cores"), ({}, "unknown")],
)
def test_numa_nodes_are_told_with_their_cores(numa, found):
    finding = doctor._numa(numa)
    assert (finding.ok, finding.found) == (True, found)


def test_machine_without_gpus_lacks_nothing():
    finding = doctor._gpus([], None)
    assert (finding.ok, finding.found) == (True, "none")


def test_gpus_are_counted_by_model():
    finding = doctor._gpus(["NVIDIA H200", "NVIDIA L4", "NVIDIA H200"], "13.0")
    assert (finding.ok, finding.found) == (True, "2 x NVIDIA H200, 1 x NVIDIA L4")
    assert "CUDA 13.0" in finding.why


def test_gpus_that_torch_cannot_use_are_missing_with_the_way_to_get_them():
    finding = doctor._gpus(["NVIDIA L4"], None)
    assert not finding.ok
    assert "install the same version's CUDA build" in finding.why


def open_descriptors():
    return sorted(entry.name for entry in Path("/proc/self/fd").iterdir())


def test_processes_that_share_memory_are_found_to():
    before = open_descriptors()
    finding = doctor._shared_memory()
    assert (finding.ok, finding.found) == (True, "works"), finding.why
    assert open_descriptors() == before


def test_processes_that_do_not_see_each_others_memory_are_told_why(monkeypatch):
    monkeypatch.setattr(doctor, "_ATTACH", doctor._ATTACH.replace("argv[1]", "argv[1] + 'gone'"))
    finding = doctor._shared_memory()
    assert (finding.ok, finding.found) == (False, "fails")
    assert "No such file" in finding.why
    assert "gloo" in finding.why


def test_memory_that_another_process_wrote_elsewhere_is_not_shared(monkeypatch):
    monkeypatch.setattr(doctor, "_ATTACH", "")
    finding = doctor._shared_memory()
    assert not finding.ok
    assert "did not arrive" in finding.why


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
