"""A job on Spark's driver and executor, each started by `spark-node` as Kubernetes starts its pod.

Kubernetes hands a driver its arguments and an executor its variables, and schedules the two; here a
standalone master without workers stands for its scheduler. Run in the `spark` image, this prints
the job's result and both exit codes as JSON. As `spark_pods.py job FILE` it is the job.

Arguments and variables: https://github.com/apache/spark/tree/v3.5.9/resource-managers/kubernetes/core,
features/DriverCommandFeatureStep.scala and features/BasicExecutorFeatureStep.scala.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOST = "127.0.0.1"
MASTER_PORT, DRIVER_PORT = 17077, 17079
LIMIT_S = 120
SECURITY = {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}


def job(facts_file: Path) -> None:
    from pyspark import SparkContext

    with SparkContext() as context:
        # What the driver's scheduler would put into an executor's pod.
        facts = {
            "application": context.applicationId,
            "java_options": context.getConf().get("spark.executor.extraJavaOptions"),
        }
        facts_file.with_suffix(".new").write_text(json.dumps(facts))
        facts_file.with_suffix(".new").rename(facts_file)
        print(context.parallelize(range(100), 2).map(lambda number: number**2).sum())


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def wait_until(condition, what: str) -> None:
    give_up_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > give_up_s:
            sys.exit(f"{what} within {LIMIT_S} s: not seen")
        time.sleep(0.2)


def executor_environment(secret: str, facts: dict[str, str]) -> dict[str, str]:
    java_options = [f"-D{name}={value}" for name, value in SECURITY.items()]
    java_options += facts["java_options"].split()
    return {
        **{f"SPARK_JAVA_OPT_{number}": option for number, option in enumerate(java_options)},
        "_SPARK_AUTH_SECRET": secret,
        "SPARK_DRIVER_URL": f"spark://CoarseGrainedScheduler@{HOST}:{DRIVER_PORT}",
        "SPARK_EXECUTOR_CORES": "1",
        "SPARK_EXECUTOR_MEMORY": "512m",
        "SPARK_APPLICATION_ID": facts["application"],
        "SPARK_EXECUTOR_ID": "1",
        "SPARK_RESOURCE_PROFILE_ID": "0",
        "SPARK_EXECUTOR_POD_IP": HOST,
        "SPARK_EXECUTOR_POD_NAME": "pod-1",
    }


def start(started: list[subprocess.Popen[str]], *words: str, **environment: str):
    process = subprocess.Popen(
        ["spark-node", *words],
        env={**os.environ, "SPARK_LOCAL_HOSTNAME": HOST, "SPARK_LOCAL_IP": HOST, **environment},
        stdout=subprocess.PIPE if words[0] == "driver" else sys.stderr,
        text=True,
    )
    started.append(process)
    return process


def pods(folder: Path, started: list[subprocess.Popen[str]]) -> dict[str, object]:
    start(
        started, "master",
        SPARK_MASTER_PORT=str(MASTER_PORT), SPARK_MASTER_WEBUI_PORT="18080",
    )  # fmt: skip
    wait_until(lambda: listens(MASTER_PORT), "a master that listens")
    secret = Path(os.environ.get("SPARK_SECRET_FILE", "/shared/.spark-secret")).read_text()
    settings = {
        "spark.master": f"spark://{HOST}:{MASTER_PORT}",
        "spark.app.name": "pods",
        "spark.driver.host": HOST,
        "spark.driver.port": DRIVER_PORT,
        "spark.ui.enabled": "false",
        "spark.authenticate.secret": secret,
        **SECURITY,
    }
    properties, facts = folder / "spark.properties", folder / "facts"
    properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    driver = start(
        started, "driver", "--properties-file", str(properties),
        "--class", "org.apache.spark.deploy.PythonRunner", __file__, "job", str(facts),
        SPARK_DRIVER_BIND_ADDRESS=HOST,
    )  # fmt: skip
    wait_until(lambda: facts.exists() or driver.poll() is not None, "a driver's context")
    executor = start(
        started, "executor", **executor_environment(secret, json.loads(facts.read_text()))
    )
    said, _ = driver.communicate(timeout=LIMIT_S)
    return {
        "said": said.split(),
        "driver": driver.returncode,
        "executor": executor.wait(timeout=LIMIT_S),
    }


def main() -> None:
    if sys.argv[1:2] == ["job"]:
        job(Path(sys.argv[2]))
        return
    started: list[subprocess.Popen[str]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(pods(Path(folder), started)))
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
