"""Objects follow the operators' schemas and ask for what the trial was planned with."""

from __future__ import annotations

import dataclasses
from importlib.resources import files

import jsonschema
import pytest
import yaml
from tests.unit.launchers.schedulers.all_launchers import SPEC, planned
from tests.unit.launchers.schedulers.published import check

from paceline.launchers.schedulers.files import Places
from paceline.launchers.schedulers.kubernetes import (
    KubernetesSettings,
    object_name,
    render_kubernetes,
)
from paceline.plan.trial import Trial

_SETTINGS = KubernetesSettings(
    places=Places(run_dir="/shared/runs/x", data_dir="/shared/data"),
    claim="volume",
    registry="registry.example/",
    memory_gib=1.5,
)


def _objects(text: str = SPEC, settings: KubernetesSettings = _SETTINGS):
    rendered = render_kubernetes(planned(text), settings)
    documents = {name: list(yaml.safe_load_all(text)) for name, text in rendered.files.items()}
    return documents, rendered.left_out


def _of_kind(kind: str):
    documents, _ = _objects()
    (found,) = [objects for objects in documents.values() if objects[1]["kind"] == kind]
    trial_map, *objects = found
    assert trial_map["kind"] == "ConfigMap"
    return objects


def _shipped(objects) -> Trial:
    return Trial.model_validate_json(objects[0]["data"]["trial.json"])


@pytest.mark.parametrize(
    "name", ["quickstart", "transports", "strategies", "lerat2022-distributed", "two nodes"]
)
def test_every_object_follows_its_schema(name: str) -> None:
    shipped = files("paceline").joinpath(f"experiments/{name}.toml")
    documents, _ = _objects(SPEC if name == "two nodes" else shipped.read_text("utf-8"))
    assert documents
    for objects in documents.values():
        for each in objects:
            check(each)


def test_a_misspelt_field_is_refused() -> None:
    job, *_ = _of_kind("MPIJob")
    template = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
    template["spec"]["container"] = template["spec"].pop("containers")
    with pytest.raises(ValueError, match="containers"):
        check(job)
    job, *_ = _of_kind("MPIJob")
    job["spec"]["slotPerWorker"] = job["spec"].pop("slotsPerWorker")
    with pytest.raises(jsonschema.ValidationError, match="slotPerWorker"):
        check(job)
    application, *_ = _of_kind("SparkApplication")
    application["spec"]["driver"]["core"] = application["spec"]["driver"].pop("cores")
    with pytest.raises(AssertionError):
        check(application)


def test_each_repeat_is_an_object_of_its_own_and_no_two_share_a_name() -> None:
    trials = planned(files("paceline").joinpath("experiments/transports.toml").read_text("utf-8"))
    names = [object_name(trial) for trial in trials]
    assert len(set(names)) == len(names)
    first, second, _ = _of_kind("MPIJob")
    assert first["metadata"]["name"].removesuffix("r0") == second["metadata"]["name"][:-2]
    assert second["metadata"]["annotations"]["paceline-trial"].endswith(".r1")


def test_an_mpi_job_has_a_worker_a_node_and_a_slot_a_rank() -> None:
    job = _of_kind("MPIJob")[0]["spec"]
    assert job["slotsPerWorker"] == 3
    assert job["runPolicy"]["activeDeadlineSeconds"] == 901  # beyond the trial's own 601
    worker, launcher = (job["mpiReplicaSpecs"][name] for name in ("Worker", "Launcher"))
    assert worker["replicas"] == 2
    assert launcher["replicas"] == 1
    (container,) = worker["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "6", "memory": "4608Mi"}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    (container,) = launcher["template"]["spec"]["containers"]
    command = container["command"]
    assert command[:3] == ["mpirun", "-n", "6"]
    assert command[command.index("--map-by") + 1] == "ppr:3:node"
    assert command[command.index("btl_tcp_if_include") + 1] == "ib0"
    assert command[-6:] == [
        "--trial", "/etc/paceline/trial.json", "--out", "/shared/runs/x", "--repeat", "0",
    ]  # fmt: skip
    for pod in (worker, launcher):
        spec = pod["template"]["spec"]
        assert {"name": "trial", "mountPath": "/etc/paceline"} in spec["containers"][0][
            "volumeMounts"
        ]
        (volume,) = [v for v in spec["volumes"] if v["name"] == "trial"]
        assert volume["configMap"]["name"] == _maps()["mpi"]["metadata"]["name"]


def _maps():
    documents, _ = _objects()
    return {_shipped(objects).launcher: objects[0] for objects in documents.values()}


def test_the_shipped_trial_is_the_planned_one_with_the_data_of_the_cluster() -> None:
    documents, _ = _objects()
    of = {trial.configuration: trial for trial in planned() if trial.repeat == 0}
    for objects in documents.values():
        shipped = _shipped(objects)
        assert shipped.training.dataset == "/shared/data/tiny"
        training = shipped.training.model_copy(update={"dataset": "/d"})
        same = shipped.model_copy(update={"training": training})
        assert same == of[shipped.configuration]


def test_a_spark_application_has_an_executor_a_node_with_room_beside_the_jvm() -> None:
    spec = _of_kind("SparkApplication")[0]["spec"]
    executor = spec["executor"]
    assert (executor["instances"], executor["cores"]) == (2, 2)
    assert executor["memory"] == "3g"  # the spec's own word
    assert executor["memoryOverhead"] == "1536m"  # one rank a node
    assert spec["sparkConf"]["spark.locality.wait"] == "7s"
    assert spec["sparkConf"]["spark.task.cpus"] == "2"
    assert spec["sparkConf"]["spark.dynamicAllocation.enabled"] == "false"
    assert "spark.driver.host" not in spec["sparkConf"]  # that of a local master
    assert not {"spark.executor.instances", "spark.executor.cores"} & set(spec["sparkConf"])
    assert _maps()["spark"]["data"]["trial.json"]
    assert spec["arguments"][:2] == ["--trial", "/etc/paceline/trial.json"]
    assert {"name": "trial", "mountPath": "/etc/paceline"} in spec["driver"]["volumeMounts"]


def test_images_volume_and_namespace_are_the_clusters_own() -> None:
    settings = dataclasses.replace(_SETTINGS, namespace="training")
    documents, _ = _objects(SPEC, settings)
    for objects in documents.values():
        for each in objects:
            assert each["metadata"]["namespace"] == "training"
            if each["kind"] == "ConfigMap":
                continue
            text = yaml.safe_dump(each)
            assert "image: registry.example/paceline" in text
            assert "claimName: volume" in text
            assert "&id" not in text


def test_what_kubernetes_cannot_be_told_is_left_out_with_its_reason() -> None:
    text = SPEC.replace('transport = "gloo"', 'transport = "mpi"')
    documents, left_out = _objects(text)
    assert len(documents) == 3
    ((configuration, reason),) = left_out.items()
    assert "spark.mpi" in configuration
    assert "ssh" in reason


def test_telemetry_of_places_that_pods_do_not_see_is_left_out() -> None:
    seen = """
[telemetry]
listen_host = "0.0.0.0"
listen_port = 9464
targets_dir = "/shared/targets"
"""
    documents, left_out = _objects(SPEC + seen)
    assert left_out == {}
    for objects in documents.values():
        telemetry = _shipped(objects).telemetry
        assert (telemetry.listen_host, telemetry.listen_port) == ("0.0.0.0", 9464)
        assert telemetry.targets_dir == "/shared/targets"
    hidden = seen + 'bearer_token_file = "/etc/token"\ntextfile_dir = "/shared/text"\n'
    documents, left_out = _objects(SPEC + hidden)
    assert documents == {}
    assert set(left_out.values()) == {
        "pods see only /shared, not [telemetry] bearer_token_file = '/etc/token'"
    }
