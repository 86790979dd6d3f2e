"""What is rendered means the planned trial: read back as a job script reads it, it is the same."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from paceline.job.options import parser
from paceline.job.trial_by_hand import trial_by_hand
from paceline.plan.planning import plan_trials
from paceline.render.arguments import job_arguments, why_not
from paceline.spec.loading import parse_spec

# of the launcher's own command line, of the machine, or of the run that keeps the records
_NOT_OPTIONS: dict[str, bool | dict[str, bool]] = {
    **dict.fromkeys(("mpi", "spark", "id", "repeat", "training", "save_tensors"), True),
    "placement": {"core_budget": True},
}
_EXPERIMENTS = (
    "quickstart",
    "transports",
    "strategies",
    "lerat2022-distributed",
    "lerat2022-local",
)

_SEVERAL_NODES = """
schema = 1
name = "nodes"
[network]
interface = "eth0"
[training]
max_steps = 9
dropout = false
reading = "stream"
learning_rate = 0.0123456789
[[workloads]]
name = "tiny"
[[trials]]
launcher = "local"
local_strategy = "sequential"
[[trials]]
launcher = "mpi"
local_strategy = "hybrid"
nodes = 2
replicas = 2
stages = 2
oversubscribe = true
split_points = [5]
[[trials]]
launcher = "mpi"
local_strategy = "processes"
nodes = 2
ranks_per_node = 2
reduction = "flat"
bucket_mb = 3.5
buckets_in_flight = 2
algorithm = "ring"
[[trials]]
launcher = "spark"
local_strategy = "processes"
transport = "gloo"
nodes = 2
ranks_per_node = 2
averaging_period = 4
averaging_start = 3
[limits]
trial_s = 77
"""
_TELEMETRY = """
[telemetry]
interval_s = 0.25
listen_host = "0.0.0.0"
listen_port = 9464
targets_dir = "/etc/prometheus/targets of all"
textfile_dir = "/var/lib/node_exporter"
tls_certificate = "/etc/paceline/host.pem"
tls_key = "/etc/paceline/host.key"
tls_client_ca = "/etc/paceline/ca.pem"
bearer_token_file = "/etc/paceline/token"
"""


def _planned(text: str, where: str):
    experiment = parse_spec(text, where)
    return plan_trials(experiment, {str(w.name): "/data/x" for w in experiment.workloads}, 2)


def _shipped(name: str):
    return _planned(files("paceline").joinpath(f"experiments/{name}.toml").read_text("utf-8"), name)


def _read_back(trial):
    words = job_arguments(trial, data="/data/x", run_dir="/runs/y")
    options = parser("test").parse_args([*words, "--repeat", str(trial.repeat)])
    place = trial.placement
    return trial_by_hand(options, trial.launcher, place.nodes, place.ranks_per_node)


@pytest.mark.parametrize("name", [*_EXPERIMENTS, "several nodes"])
def test_options_read_back_are_the_trial_that_was_planned(name: str) -> None:
    trials = _planned(_SEVERAL_NODES, name) if name == "several nodes" else _shipped(name)
    assert trials
    for trial in trials:
        if why_not(trial) is not None:
            continue
        again = _read_back(trial)
        assert again.model_dump(exclude=_NOT_OPTIONS) == trial.model_dump(exclude=_NOT_OPTIONS)
        assert again.training == trial.training
        assert again.id == trial.id


def test_a_trial_without_a_sidecar_stays_without() -> None:
    (trial, *_) = _planned(_SEVERAL_NODES + "[telemetry]\nenabled = false\n", "test")
    assert "--no-sidecar" in job_arguments(trial, data="/data/x", run_dir="/runs/y")
    assert _read_back(trial).telemetry == trial.telemetry


def test_every_setting_of_telemetry_is_passed_on() -> None:
    trial = _planned(_SEVERAL_NODES + _TELEMETRY, "test")[0]
    assert _read_back(trial).telemetry == trial.telemetry
    password = _TELEMETRY.replace("bearer_token_file", "basic_auth_file")
    with_password = _planned(_SEVERAL_NODES + password, "test")[0]
    assert _read_back(with_password).telemetry == with_password.telemetry
    told = {**trial.telemetry.model_dump(), **with_password.telemetry.model_dump()}
    unset = {name for name, value in told.items() if value is None}
    assert unset == {"bearer_token_file"}  # set in the first; no setting was forgotten here


def test_no_metrics_stay_none() -> None:
    trial = _planned(_SEVERAL_NODES + "[telemetry]\nlisten_port = -1\n", "test")[0]
    assert _read_back(trial).telemetry.listen_port == -1


def test_relative_path_of_telemetry_means_the_same_wherever_the_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trial = _planned(_SEVERAL_NODES + '[telemetry]\ntextfile_dir = "text"\n', "test")[0]
    words = job_arguments(trial, data="/data/x", run_dir="/runs/y")
    assert words[words.index("--telemetry-textfile-dir") + 1] == str(tmp_path / "text")


def test_parameters_that_have_no_option_are_refused() -> None:
    trial = _planned(_SEVERAL_NODES, "test")[0]
    assert why_not(trial) is None
    told = trial.model_copy(update={"mpi_parameters": {"btl_tcp_links": "2"}})
    assert "mpi_parameters" in (why_not(told) or "")
