"""The compose files and what they name fit together: nothing here runs them, nor needs Docker."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

DOCKER = Path(__file__).resolve().parents[3] / "docker"
IMAGE_EXPERIMENTS = "/opt/paceline/experiments/"  # where the Dockerfile puts docker/experiments
FILES = ("compose.spark.yaml", "compose.mpi.yaml", "compose.monitoring.yaml")


def services(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / name).read_text())["services"])


def experiment(service: dict[str, Any]) -> dict[str, Any]:
    """The spec that a service's `paceline run` names."""
    program, command, spec = service["command"]
    assert (program, command) == ("paceline", "run")
    assert spec.startswith(IMAGE_EXPERIMENTS)
    return tomllib.loads(
        (DOCKER / "experiments" / spec.removeprefix(IMAGE_EXPERIMENTS)).read_text()
    )


def test_ports_are_published_on_loopback_only():
    every_service = [service for name in FILES for service in services(name).values()]
    ports = [port for service in every_service for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", FILES)
def test_what_is_waited_for_exists_and_says_that_it_is_healthy(name):
    all_services = services(name)
    waits = [
        (all_services[other], wait["condition"])
        for service in all_services.values()
        for other, wait in service.get("depends_on", {}).items()
    ]
    assert waits
    for awaited, condition in waits:
        assert condition == "service_healthy"
        # The images of the clusters have a health check of their own.
        assert "healthcheck" in awaited or "target" in awaited.get("build", {})
        assert not awaited.get("healthcheck", {}).get("disable", False)


@pytest.mark.parametrize("name", FILES)
def test_folders_of_the_repository_that_are_mounted_exist(name):
    mounts = [mount for service in services(name).values() for mount in service["volumes"]]
    own = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]
    assert [folder for folder in own if not (DOCKER / folder).is_dir()] == []


@pytest.mark.parametrize("name", FILES[:2])
def test_targets_are_those_of_the_dockerfile(name):
    stages = {
        words[-1]
        for words in (line.split() for line in (DOCKER / "Dockerfile").read_text().splitlines())
        if words[:1] == ["FROM"]
    }
    assert {service["build"]["target"] for service in services(name).values()} <= stages


def test_spark_workload_and_workers_find_the_master_by_its_name():
    nodes = services("compose.spark.yaml")
    workers = [node for node in nodes.values() if node["command"][0] == "worker"]
    masters = {worker["command"][1] for worker in workers}
    assert len(workers) == 2
    assert masters == {experiment(nodes["submit"])["spark"]["master"]}
    master = nodes[urlsplit(masters.pop()).hostname]
    assert (master["hostname"], master["command"]) == ("spark-master", ["master"])


def test_mpi_workload_names_the_nodes_that_are_started():
    nodes = services("compose.mpi.yaml")
    hosts_file = experiment(nodes["launch"])["mpi"]["hostfile"].removeprefix(IMAGE_EXPERIMENTS)
    lines = (DOCKER / "experiments" / hosts_file).read_text().splitlines()
    named = {line.split()[0] for line in lines}
    started = {name for name, node in nodes.items() if "command" not in node}
    assert named == started == {nodes[name]["hostname"] for name in started}
    assert len(named) == 2
