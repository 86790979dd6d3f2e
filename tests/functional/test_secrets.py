"""Secrets where users put them appear in nothing that a run, a report or a rendering writes."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING

import pytest
from tests.functional.cli_runs import SMALL

if TYPE_CHECKING:
    from pathlib import Path

    from tests.functional.cli_runs import Cli

pytestmark = pytest.mark.functional

SECRET = "hunter2-9f1c"
# Variables with which users give secrets to storage, trackers, hubs and Spark.
VARIABLES = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD",
    "MY_PASSWORD", "_SPARK_AUTH_SECRET",
)  # fmt: skip
TRIALS = """
[[trials]]
launcher = "spark"
local_strategy = "sequential"
[mpi]
arguments = ["-x", "HF_TOKEN"]
"""


def test_no_file_and_no_output_contains_a_secret(paceline: Cli, tmp_path: Path) -> None:
    for name in ("auth", "token"):
        (tmp_path / name).write_text(f"user:{SECRET}" if name == "auth" else SECRET, "utf-8")
        (tmp_path / name).chmod(0o600)
    spark = tmp_path / "spark-conf"
    spark.mkdir()
    (spark / "spark-defaults.conf").write_text(f"spark.hadoop.fs.s3a.secret.key {SECRET}\n")
    variables = {**dict.fromkeys(VARIABLES, SECRET), "SPARK_CONF_DIR": str(spark)}
    with_secrets = dataclasses.replace(paceline, environment={**paceline.environment, **variables})
    telemetry = '[telemetry]\nlisten_host = "127.0.0.1"\nbearer_token_file = "token"\n'
    small = SMALL.replace("max_steps = 20", "max_steps = 4").replace("[telemetry]\n", telemetry)
    (tmp_path / "small.toml").write_text(small + TRIALS, "utf-8")
    outputs = []
    for words in (
        ("run", "small.toml", "--out", "run"),
        ("report", "run"),
        ("export", "run", "--to", "csv"),
        ("plan", "small.toml"),
        ("render", "slurm", "small.toml", "--out", "slurm"),
        ("render", "kubernetes", "small.toml", "--out", "kubernetes"),
    ):
        ended = with_secrets(*words) if words[0] == "run" else with_secrets.main(*words)
        outputs.append(ended.stdout + ended.stderr)
        if words[0] != "render":  # pods do not see the file of the token
            assert ended.returncode == 0, outputs[-1]
    assert not any(SECRET in text for text in outputs)
    for name in ("auth", "token"):
        (tmp_path / name).unlink()
    shutil.rmtree(spark)
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) > 20
    assert [file for file in written if SECRET.encode() in file.read_bytes()] == []
