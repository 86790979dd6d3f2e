from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.unit.fabricated_system import two_sockets

from paceline.base.host.machine import (
    all_packages,
    cpu_governor,
    default_cache_dir,
    gpu_models,
    machine_facts,
    name_of_cpu,
    torch_cuda,
)


def driver_file(root, bus, text):
    folder = root / "proc/driver/nvidia/gpus" / bus
    folder.mkdir(parents=True)
    (folder / "information").write_text(text)


def test_gpus_are_named_by_their_driver_in_the_order_of_the_bus(tmp_path):
    driver_file(tmp_path, "0000:41:00.0", "Model: \t\t NVIDIA L4\nIRQ: 5\n")
    driver_file(tmp_path, "0000:01:00.0", "Model: \t\t NVIDIA H200\nGPU UUID: GPU-1\n")
    assert gpu_models(tmp_path) == ["NVIDIA H200", "NVIDIA L4"]


def test_gpus_in_a_container_without_the_drivers_files_are_counted(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert gpu_models(tmp_path) == ["NVIDIA GPU", "NVIDIA GPU"]


def test_machine_without_a_driver_has_no_gpus(tmp_path):
    assert gpu_models(tmp_path) == []


def test_cuda_of_the_installed_torch_is_told_without_importing_it():
    assert torch_cuda() == torch.version.cuda


def test_facts_say_how_the_cores_lie_and_are_json(tmp_path):
    facts = machine_facts(two_sockets(tmp_path, cores=2))
    assert facts["numa_cores"] == {"0": [0, 4, 1, 5], "1": [2, 6, 3, 7]}
    assert json.loads(json.dumps(facts)) == facts
    assert 1 <= facts["usable_physical_cores"] <= facts["usable_cores"]


def test_governors_of_all_cores_are_named_once(tmp_path):
    assert cpu_governor(tmp_path) is None
    for core, name in enumerate(("powersave", "performance", "powersave")):
        folder = tmp_path / f"cpu/cpu{core}/cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_governor").write_text(f"{name}\n")
    assert cpu_governor(tmp_path) == "performance, powersave"


def test_list_of_packages_has_every_distribution():
    packages = all_packages()
    assert packages["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert {"numpy", "pytest", "pydantic"} <= set(packages)
    assert list(packages) == sorted(packages, key=str.lower)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PACELINE_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/paceline"),
        ({"HOME": "/home/me"}, "/home/me/.cache/paceline"),
    ],
)
def test_the_cache_lies_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("PACELINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert default_cache_dir() == Path(expected)


def test_list_of_packages_does_not_depend_on_what_was_imported(tmp_path, monkeypatch):
    before = all_packages()
    copy = tmp_path / "setuptools" / "_vendor"
    (copy / "numpy-0.1.dist-info").mkdir(parents=True)
    (copy / "numpy-0.1.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(copy)
    assert all_packages() == before


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (
            "cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\ncpu family\t: 26\n",
            "AMD EPYC (family 25, model 17)",
        ),
        ("processor\t: 0\nmodel name\t: Neoverse\n", "Neoverse"),
    ],
)
def test_cpus_that_a_hypervisor_gives_the_same_name_are_told_apart(cpuinfo: str, name: str) -> None:
    assert name_of_cpu(cpuinfo) == name
