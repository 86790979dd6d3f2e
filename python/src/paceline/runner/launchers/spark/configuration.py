"""The configuration of Spark for a trial."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence

from paceline.base.errors import EnvironmentLacks
from paceline.base.host.spark import COLLECTOR, QUICK_JVM
from paceline.plan.trials.trial import Trial, task_facts
from paceline.runner.job.context import rank_environment
from paceline.runner.launchers.base import rank_memory_mib
from paceline.runner.launchers.descriptors import DEFAULT_DRIVER_MEMORY, SparkOptions, is_local
from paceline.runner.launchers.mpi.implementations import MPIRUN_VARIABLE

# For messages about executors that do not fit the ranks.
EXECUTORS_ADVICE = (
    "give executors spark.executor.cores = ranks per node x spark.task.cpus, one executor a node"
)
_EXCLUDING = ("spark.excludeOnFailure.enabled", "spark.blacklist.enabled")  # the first one counts
# What a site sets for its own jobs and no trial can have. Other settings of a site are kept.
_NOT_OF_THE_SITE = {
    "spark.dynamicAllocation.enabled": "false",
    "spark.excludeOnFailure.enabled": "false",  # refused beside spark.task.maxFailures = 1
    "spark.executor.pyspark.memory": "0",  # no limit: of the address space, where torch needs more
    "spark.python.profile": "false",
    "spark.speculation": "false",
    "spark.stage.maxConsecutiveAttempts": "1",
}
_OF_A_TASK = re.compile(r"spark\.task\.resource\.[^.]+\.amount")
_A_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")  # a JVM refuses two

_HEARTBEATS = 4  # in the limit of a collective
_LONGEST_HEARTBEAT_S = 10  # Spark's default
_TENSORS = 2  # a parameter's weight and momentum
# Copies of a task's result in the JVM: the record, its serialised form, and garbage. Two AlexNets
# of 456 MB each took 3.8 GiB of a heap of 4, of which 2.2 were in use.
_COPIES = 4
_MIB = 2**20
_JVM_MIB = 1024  # heap that Spark itself needs
_JVM_BESIDE_MIB = 384  # of the JVM itself, beside its heap
# Spark's own wait for executors, before the job asks how many slots there are.
_REGISTRATION_S = 30


def wrong_nodes(expected: int, nodes: Sequence[str]) -> EnvironmentLacks:
    """Return the error about ranks on other numbers of nodes than planned."""
    return EnvironmentLacks(
        f"expected the ranks on {expected} node(s), Spark placed them on {len(nodes)} "
        f"({', '.join(nodes)}); change nodes and "
        "ranks_per_node of the trial, or the number of cores of the executors"
    )


def check_conf(conf: Mapping[str, str]) -> None:
    """Raise EnvironmentLacks for a configuration with which a barrier stage cannot run."""
    if conf.get("spark.dynamicAllocation.enabled", "false").strip().lower() == "true":
        raise EnvironmentLacks(
            "spark.dynamicAllocation.enabled is true, but a barrier stage needs all its slots at "
            "once (SPARK-24942); remove it or set it to false ([spark] conf, spark-submit --conf)"
        )
    excludes = next((conf[name] for name in _EXCLUDING if name in conf), "false")
    if excludes.strip().lower() == "true" and conf.get("spark.task.maxFailures") == "1":
        raise EnvironmentLacks(
            "spark.excludeOnFailure.enabled is true, which Spark refuses beside "
            "spark.task.maxFailures=1; set it to false ([spark] conf, spark-submit --conf): a "
            "failed task ends the trial, so that there is nothing to exclude"
        )


def master_of(trial: Trial) -> str:
    """Return the spec's master, else this node with as many slots as the trial needs."""
    slots = slots_per_node(trial) * trial.placement.nodes
    return trial.options_as(SparkOptions).master or f"local[{slots}]"


def slots_per_node(trial: Trial) -> int:
    """Return Spark's cores, one per thread: more than the node has where ranks share cores."""
    return trial.placement.ranks_per_node * trial.placement.threads_per_rank


def job_defaults(trial: Trial, *, local: bool) -> dict[str, str]:
    """Return the configuration that a trial needs; the job script sets it where it is missing."""
    conf = {
        "spark.app.name": trial.id,
        "spark.task.cpus": str(trial.placement.threads_per_rank),
        "spark.task.maxFailures": "1",
        "spark.python.worker.reuse": "false",
        # The default is a year.
        "spark.barrier.sync.timeout": str(math.ceil(trial.limits.rendezvous_s)),
        # The default waits 10 minutes for slots, 40 checks 15 s apart, with only a warning.
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "3",
        **native_settings(trial),
    }
    if not local:
        return {**conf, **_cluster_shape(trial), **liveness_settings(trial)}
    return {
        **conf,
        "spark.ui.enabled": "false",
        "spark.authenticate": "true",  # with a local master Spark creates the secret itself
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }


# Settings that matter only while a context and its executors start.
_OF_A_START = (
    "spark.app.name",
    "spark.authenticate",
    "spark.cores.max",
    "spark.driver.bindAddress",
    "spark.driver.host",
    "spark.executor.cores",
    "spark.executor.instances",
    "spark.scheduler.maxRegisteredResourcesWaitingTime",
    "spark.scheduler.minRegisteredResourcesRatio",
    "spark.ui.enabled",
)
_DEFAULTS = {
    "spark.task.cpus": "1",
    "spark.executor.heartbeatInterval": "10s",
    "spark.python.worker.reuse": "true",
}


def lacking_settings(trial: Trial, conf: Mapping[str, str]) -> dict[str, str]:
    """Return the settings for a trial for which a running context has another value, or none."""
    wanted = job_defaults(trial, local=is_local(conf["spark.master"]))
    if trial.transport != "spark-rounds":
        del wanted["spark.python.worker.reuse"]  # the tasks have workers of their own
    return {
        name: value
        for name, value in wanted.items()
        if name not in _OF_A_START and conf.get(name, _DEFAULTS.get(name)) != value
    }


def configuration(
    trial: Trial, site: Mapping[str, str] | None = None, archive: str = ""
) -> dict[str, str]:
    """Return the configuration for spark-submit, before that of the spec.

    site: the settings of spark-defaults.conf. archive: option of the driver's JVM.
    """
    local = is_local(master_of(trial))
    conf = {
        **_NOT_OF_THE_SITE,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
        **_without_resources(trial, site or {}, local=local),
        **_java_options(trial, site or {}, archive),
        **job_defaults(trial, local=local),
    }
    if not local:
        own = {k: v for k, v in os.environ.items() if k == MPIRUN_VARIABLE}
        ranks = {**rank_environment(trial), **own}
        conf |= {f"spark.executorEnv.{k}": v for k, v in ranks.items()}
    return conf


def _without_resources(trial: Trial, site: Mapping[str, str], *, local: bool) -> dict[str, str]:
    """Return settings with which tasks need no resources of the site's own jobs, such as a share of
    a GPU: with a local master, which has none to give, Spark would wait for ever."""
    if trial.device != "cpu" and not local:
        return {}
    return {name: "0" for name in site if _OF_A_TASK.fullmatch(name)}


def _java_options(trial: Trial, site: Mapping[str, str], archive: str) -> dict[str, str]:
    """Return the options of the JVMs, which Spark puts before `extraJavaOptions`.

    So those of the site and the spec stay, Kerberos and proxies for example, and have the last
    word. The site's own defaults are repeated, because a setting has one value. The archive is the
    driver's only: the Java of executors is not known, and Java 8 does not start with its options.
    """
    options = {}
    for process, own in (("driver", archive), ("executor", "")):
        extra, default = (f"spark.{process}.{kind}JavaOptions" for kind in ("extra", "default"))
        theirs = {**site, **trial.options_as(SparkOptions).conf}.get(extra, "")
        defaults = site.get(default, "")
        quick = QUICK_JVM
        if _A_COLLECTOR.search(f"{defaults} {theirs}"):
            quick = quick.replace(COLLECTOR, "")
        options[default] = " ".join(f"{quick} {own} {defaults}".split())
    return options


def _cluster_shape(trial: Trial) -> dict[str, str]:
    """Return the executors to use on a cluster: one per node, with cores and memory of its ranks.

    YARN's own default is two executors of one core.
    """
    place = trial.placement
    registration_s = min(_REGISTRATION_S, math.ceil(trial.limits.slots_s))
    return {
        "spark.cores.max": str(slots_per_node(trial) * place.nodes),
        "spark.executor.cores": str(slots_per_node(trial)),
        "spark.executor.instances": str(place.nodes),  # YARN and Kubernetes
        "spark.executor.memoryOverhead": f"{_beside_heap_mib(trial)}m",
        # The session is ready when all executors are, not only the first.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{registration_s}s",
    }


def _beside_heap_mib(trial: Trial) -> int:
    """Return the memory of an executor's ranks, which are processes beside its JVM."""
    return _JVM_BESIDE_MIB + trial.placement.ranks_per_node * rank_memory_mib(trial)


def native_settings(trial: Trial) -> dict[str, str]:
    """Return the settings for transport `spark-rounds`."""
    if trial.transport == "spark-rounds":
        return {
            # A worker keeps the model and its samples from round to round.
            "spark.python.worker.reuse": "true",
            # The default refuses more than 1 GiB of results, the size of three AlexNets.
            "spark.driver.maxResultSize": "0",
            "spark.executor.memory": _heap(trial, trial.placement.ranks_per_node),
            # Compression hardly reduces floating-point weights.
            "spark.broadcast.compress": "false",
            "spark.shuffle.compress": "false",
            **liveness_settings(trial),
        }
    return {}


def liveness_settings(trial: Trial) -> dict[str, str]:
    """Return the limits after which driver and executor regard each other as lost.

    In rounds only Spark can notice a lost executor, so its limit is that of a collective. Ranks
    that communicate directly have that limit themselves and can name the missing rank: Spark waits
    twice as long.
    """
    limit_s, beat_s = math.ceil(trial.limits.collective_s), heartbeat_s(trial)
    patience_s = max(limit_s if trial.transport == "spark-rounds" else 2 * limit_s, 2 * beat_s)
    return {
        # The defaults are 120, 10 and 60 s.
        "spark.network.timeout": f"{patience_s}s",
        "spark.executor.heartbeatInterval": f"{beat_s}s",
        "spark.network.timeoutInterval": f"{beat_s}s",
        # After that an executor ends, and its tasks with it; the default is 60 beats, 10 minutes.
        "spark.executor.heartbeat.maxFailures": str(math.ceil(patience_s / beat_s)),
    }


def heartbeat_s(trial: Trial) -> int:
    """Return the interval at which executors report to the driver."""
    limit_s = math.ceil(trial.limits.collective_s)
    return max(1, min(_LONGEST_HEARTBEAT_S, limit_s // _HEARTBEATS))


def driver_memory(trial: Trial) -> str:
    """Return the driver's heap: the spec's value, else the size of all ranks' weights."""
    asked = trial.options_as(SparkOptions).driver_memory
    if trial.transport != "spark-rounds" or asked != DEFAULT_DRIVER_MEMORY:
        return asked
    return _heap(trial, trial.placement.ranks)


def _heap(trial: Trial, tasks: int) -> str:
    """Return a heap that holds the results of so many tasks, as Spark writes sizes."""
    facts = task_facts(trial.training)
    results_bytes = tasks * facts.parameter_bytes * _TENSORS * _COPIES
    return f"{_JVM_MIB + math.ceil(results_bytes / _MIB)}m"
