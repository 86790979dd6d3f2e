"""Objects follow the operators' schemas and ask for what the trial was planned with."""

from __future__ import annotations

import dataclasses
import subprocess
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml
from tests.unit.runner.launchers.schedulers.all_launchers import SPEC, planned
from tests.unit.runner.launchers.schedulers.published import check

from paceline.base.errors import UsageError
from paceline.plan.trials.trial import Trial
from paceline.runner.launchers.schedulers.files import Places
from paceline.runner.launchers.schedulers.kubernetes import (
    KubernetesSettings,
    object_name,
    render_kubernetes,
    toleration,
)

_SETTINGS = KubernetesSettings(
    places=Places(run_dir="/shared/runs/x", data_dir="/shared/data"),
    claim="volume",
    registry="registry.example/",
    memory_gib=1.5,
)

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast


def _objects(text: str = SPEC, settings: KubernetesSettings = _SETTINGS):
    """Return the objects by configuration: what its repeats share, and each of them."""
    trials = planned(text)
    rendered = render_kubernetes(trials, settings)
    documents = {}
    for trial in trials:
        if f"{trial.id}.yaml" in rendered.files:
            shared, own = yaml.load_all(rendered.files[f"{trial.id}.yaml"], _LOADER)
            documents.setdefault(trial.configuration, [shared]).append(own)
    beside = 1 if documents else 0  # the script that starts them
    of_trials = [each for those in documents.values() for each in those[1:]]
    assert len(rendered.files) == len(of_trials) + beside
    return documents, rendered.left_out


def _of_kind(kind: str, settings: KubernetesSettings = _SETTINGS):
    documents, _ = _objects(SPEC, settings)
    found = next(objects for objects in documents.values() if objects[1]["kind"] == kind)
    trial_map, *objects = found
    assert trial_map["kind"] == "ConfigMap"
    return objects


def _shipped(objects) -> Trial:
    return Trial.model_validate_json(objects[0]["data"]["trial.json"])


@pytest.mark.parametrize(
    "name", ["quickstart", "transports", "strategies", "lerat2022-distributed", "two nodes"]
)
def test_every_object_follows_its_schema(name: str) -> None:
    shipped = files("paceline").joinpath(f"plan/experiments/{name}.toml")
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
    trials = planned(
        files("paceline").joinpath("plan/experiments/transports.toml").read_text("utf-8")
    )
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
    assert executor["coreRequest"] == executor["coreLimit"] == "2"  # ranks of an MPIJob have both
    assert executor["memory"] == "3g"  # the spec's own word
    assert executor["memoryOverhead"] == "1536m"  # one rank a node
    assert spec["sparkConf"]["spark.locality.wait"] == "7s"
    assert spec["sparkConf"]["spark.task.cpus"] == "2"
    assert spec["sparkConf"]["spark.dynamicAllocation.enabled"] == "false"
    assert spec["sparkConf"]["spark.authenticate"] == "true"
    assert "pythonVersion" not in spec  # Spark ignores it since 3.1
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


def _pods(kind: str, settings: KubernetesSettings = _SETTINGS):
    """The specs of the pods that have ranks or start them."""
    spec = _of_kind(kind, settings)[0]["spec"]
    if kind == "Job":
        return [spec["template"]["spec"]]
    return [spec["mpiReplicaSpecs"][role]["template"]["spec"] for role in ("Launcher", "Worker")]


def test_every_repeat_names_the_config_map_that_exists() -> None:
    documents, _ = _objects(SPEC.replace("repeats = 3", "repeats = 11"))  # up to r10
    for objects in documents.values():
        name = objects[0]["metadata"]["name"]
        check(objects[-1])  # its name is the longest
        for each in objects[1:]:
            spec = each["spec"]
            replica = spec.get("mpiReplicaSpecs", {}).get("Worker", spec)
            pod = replica["template"]["spec"] if "template" in replica else spec
            (volume,) = [v for v in pod["volumes"] if v["name"] == "trial"]
            assert volume["configMap"]["name"] == name


def test_mpirun_starts_when_all_workers_answer() -> None:
    spec = _of_kind("MPIJob")[0]["spec"]
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    launcher, worker = _pods("MPIJob")
    probe = worker["containers"][0]["readinessProbe"]
    assert probe["tcpSocket"] == {"port": 2222}
    command = launcher["containers"][0]["command"]
    assert "ConnectionAttempts=30" in command[command.index("plm_ssh_args") + 1]


def test_two_nodes_of_a_trial_are_never_one_machine() -> None:
    job = _of_kind("MPIJob")[1]
    template = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
    executor = _of_kind("SparkApplication")[1]["spec"]["executor"]
    for labels, affinity in (
        (template["metadata"]["labels"], template["spec"]["affinity"]),
        (executor["labels"], executor["affinity"]),
    ):
        (rule,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["topologyKey"] == "kubernetes.io/hostname"
        assert rule["labelSelector"]["matchLabels"] == labels
    # a repeat that ends does not keep the next one from its machines
    assert template["metadata"]["labels"] == {"paceline-pods-of": job["metadata"]["name"]}


def test_namespaces_with_restricted_pod_security_accept_the_pods() -> None:
    containers = [c for kind in ("MPIJob", "Job") for p in _pods(kind) for c in p["containers"]]
    application = _of_kind("SparkApplication")[0]["spec"]
    for each in (*containers, application["driver"], application["executor"]):
        # https://kubernetes.io/docs/concepts/security/pod-security-standards, "Restricted"
        context = each["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def test_objects_have_the_rules_of_the_cluster() -> None:
    gpu = {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}
    settings = dataclasses.replace(
        _SETTINGS,
        pull_secrets=("registry",),
        node_selector={"pool": "big"},
        tolerations=(toleration("gpu=yes:NoSchedule"),),
        queue="research",
    )
    documents, _ = _objects(SPEC, settings)
    for objects in documents.values():
        for each in objects:
            check(each)
        labels = objects[1]["metadata"]["labels"]
        assert labels["kueue.x-k8s.io/queue-name"] == "research"
    for pod in (*_pods("MPIJob", settings), *_pods("Job", settings)):
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["nodeSelector"] == {"pool": "big"}
        assert pod["tolerations"] == [gpu]
    spec = _of_kind("SparkApplication", settings)[0]["spec"]
    assert spec["imagePullSecrets"] == ["registry"]
    assert spec["nodeSelector"] == {"pool": "big"}
    assert spec["driver"]["tolerations"] == spec["executor"]["tolerations"] == [gpu]


def test_a_toleration_is_written_as_a_taint() -> None:
    assert toleration("spot") == {"key": "spot", "operator": "Exists"}
    assert toleration("spot:NoExecute") == {
        "key": "spot", "operator": "Exists", "effect": "NoExecute",
    }  # fmt: skip
    with pytest.raises(UsageError, match="expected KEY=VALUE:EFFECT, got '=a:b'"):
        toleration("=a:b")


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


def test_each_rank_gets_a_gpu_under_the_name_of_the_cluster() -> None:
    trials = [trial.model_copy(update={"device": "cuda"}) for trial in planned()]
    left_out = render_kubernetes(trials, _SETTINGS).left_out
    assert len(left_out) == 4
    assert all("add --gpu-resource" in reason for reason in left_out.values())
    settings = dataclasses.replace(_SETTINGS, gpu_resource="nvidia.com/gpu")
    found: dict[str, list[str | None]] = {}
    rendered = render_kubernetes(trials, settings).files
    for trial in trials:
        if trial.repeat > 0:
            continue
        _, each = yaml.safe_load_all(rendered[f"{trial.id}.yaml"])
        check(each)
        spec = each["spec"]
        if each["kind"] == "SparkApplication":
            assert spec["executor"]["gpu"] == {"name": "nvidia.com/gpu", "quantity": 1}
            continue
        replicas = spec.get("mpiReplicaSpecs", {"only": spec}).values()
        containers = [replica["template"]["spec"]["containers"][0] for replica in replicas]
        resources = [container["resources"]["limits"] for container in containers]
        found[str(each["metadata"]["name"])] = [each.get("nvidia.com/gpu") for each in resources]
    # MPIJob: the launcher has no ranks, a worker has three
    assert sorted(found.values(), key=str) == [["1"], ["2"], [None, "3"]]


def test_objects_that_have_ended_are_removed_and_pods_have_no_token() -> None:
    week = 7 * 24 * 3600
    assert _of_kind("Job")[0]["spec"]["ttlSecondsAfterFinished"] == week
    assert _of_kind("MPIJob")[0]["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == week
    assert _of_kind("SparkApplication")[0]["spec"]["timeToLiveSeconds"] == week
    for pod in (*_pods("MPIJob"), *_pods("Job")):
        assert pod["automountServiceAccountToken"] is False


def test_memory_is_that_of_the_model_unless_it_is_given() -> None:
    estimated = dataclasses.replace(_SETTINGS, memory_gib=None)

    def asked(text: str) -> str:
        documents, _ = _objects(text, estimated)
        [job] = [each[1] for each in documents.values() if each[1]["kind"] == "MPIJob"]
        worker = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
        return worker["containers"][0]["resources"]["requests"]["memory"]

    assert asked(SPEC) == f"{3 * 4096}Mi"  # three ranks of a tiny model
    limited = SPEC.replace("trial_s = 601", "trial_s = 601\nrank_memory_mib = 6000")
    assert asked(limited) == "18000Mi"


_KUBECTL = """#!/bin/bash
name=$(basename "$3")
if [ "$1" = apply ]; then echo "apply $name" >> "$CALLS"; exit; fi
count=$(grep -c "get $name" "$CALLS")
echo "get $name" >> "$CALLS"
[ "$count" -gt 0 ] || { echo " Created Running"; exit; }
case $name in *local*.r1.yaml) echo "Suspended Failed ";; *spark*) echo " COMPLETED ";;
    *mpi*) echo "Created Succeeded ";; *) echo "Complete ";; esac
"""


def test_script_starts_a_trial_when_the_one_before_it_has_ended(tmp_path: Path) -> None:
    trials = planned(SPEC)
    for name, text in render_kubernetes(trials, _SETTINGS).files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "kubectl").write_text(_KUBECTL)
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    for name in ("kubectl", "sleep"):
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls)}
    ended = subprocess.run(
        ["bash", tmp_path / "submit.sh"], env=environment, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1
    [failed] = [t for t in trials if t.launcher == "local" and t.repeat == 1]
    assert ended.stderr == f"{failed.id}.yaml: failed\n"
    names = [f"{trial.id}.yaml" for trial in trials]
    expected = [f"{verb} {name}" for name in names for verb in ("apply", "get", "get")]
    assert calls.read_text().splitlines() == expected
