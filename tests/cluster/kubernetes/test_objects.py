"""A real API server of Kubernetes accepts the rendered objects, and restricted pods."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
import yaml
from tests.cluster.kubernetes.api_server import NAMESPACE, ApiServer, Refused, api_server
from tests.unit.runner.launchers.schedulers.all_launchers import SPEC, planned

from paceline.runner.launchers.schedulers.files import Places
from paceline.runner.launchers.schedulers.kubernetes import (
    KubernetesSettings,
    render_kubernetes,
    toleration,
)

pytestmark = [pytest.mark.cluster, pytest.mark.needs("kubernetes"), pytest.mark.timeout(4000)]

_SETTINGS = KubernetesSettings(
    places=Places(run_dir="/shared/runs/x", data_dir="/shared/data"),
    claim="volume",
    namespace=NAMESPACE,
    pull_secrets=("secret",),
    node_selector={"pool": "training"},
    tolerations=(toleration("pool=training:NoSchedule"),),
    queue="batch",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("kubernetes")) as started:
        yield started


def rendered(text: str) -> list[dict[str, Any]]:
    found = render_kubernetes(planned(text), _SETTINGS).files
    objects = [text for name, text in found.items() if name.endswith(".yaml")]
    return [document for text in objects for document in yaml.safe_load_all(text)]


def pod_templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document.get("spec", {})
    replicas = spec.get("mpiReplicaSpecs", {}).values()
    templates = [replica["template"] for replica in replicas]
    return [*templates, *([spec["template"]] if "template" in spec else [])]


@pytest.mark.parametrize("name", ["two nodes", "quickstart", "transports", "strategies"])
def test_every_object_is_accepted(server: ApiServer, name: str) -> None:
    shipped = files("paceline").joinpath(f"plan/experiments/{name}.toml")
    documents = rendered(SPEC if name == "two nodes" else shipped.read_text("utf-8"))
    kinds = {document["kind"] for document in documents}
    assert {"ConfigMap", "Job", "MPIJob", "SparkApplication"} >= kinds >= {"ConfigMap", "Job"}
    for document in documents:
        server.create(document, try_only=True)


def test_the_object_of_each_launcher_can_be_created(server: ApiServer) -> None:
    for document in rendered(SPEC):
        server.create(document)


def test_pods_are_accepted_where_only_restricted_ones_may_run(server: ApiServer) -> None:
    templates = [each for document in rendered(SPEC) for each in pod_templates(document)]
    assert len(templates) > 2
    for number, template in enumerate(templates):
        metadata = {**template.get("metadata", {}), "name": f"pod-{number}"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        server.create(pod, try_only=True)


def test_the_server_refuses_what_is_wrong(server: ApiServer) -> None:
    [job, *_] = [each for each in rendered(SPEC) if each["kind"] == "MPIJob"]
    job["metadata"]["name"] = "misspelt"
    job["spec"]["slotPerWorker"] = job["spec"].pop("slotsPerWorker")
    with pytest.raises(Refused, match="slotPerWorker"):
        server.create(job, try_only=True)
    template = pod_templates(job)[0]
    template["spec"]["containers"][0]["securityContext"]["runAsNonRoot"] = False
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
    with pytest.raises(Refused, match="runAsNonRoot"):
        server.create(pod, try_only=True)
