"""Declarations of all metrics: hosts, processes of a run and of its ranks, sidecar, training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.measure.records.metrics.metric import (
    CGROUP,
    HOST,
    RANK,
    RUN,
    RUN_PROCESSES,
    SIDECAR,
    TRAINING,
    Kind,
    Metric,
    Row,
)

if TYPE_CHECKING:
    from paceline.plan.trials.trial import Trial

SLOW_S = 1.0  # for readings that cost a millisecond or more on large hosts


def _host(kind: Kind, name: str, column: str, text: str, **more: Any) -> Metric:
    return Metric(f"host_{name}", kind, HOST, text, column, **more)


def _cgroup(kind: Kind, name: str, column: str, text: str) -> Metric:
    return Metric(f"cgroup_{name}", kind, CGROUP, text, f"cgroup.{column}")


def _gpu(name: str, column: str, text: str) -> Metric:
    return Metric(f"gpu_{name}", "gauge", HOST, text, f"gpus.{{gpu}}.{column}", every_s=SLOW_S)


# fmt: off
HOST_METRICS = (
    _host("counter", "cpu_seconds", "cpu_seconds.{mode}",
        "CPU time of all cores since boot, by mode. The mode `other` is irq, softirq and guest, "
        "and in runs of 0.3.0 also nice. The kernel's iowait and idle can decrease (proc(5)); here "
        "they stay constant instead."),
    _host("counter", "core_busy_seconds", "core_busy_s.{core}",
        "Time since boot in which the core was neither idle, nor in iowait, nor stolen."),
    _host("gauge", "cpu_cores", "cpu_cores",
        "Number of logical CPUs."),
    _host("gauge", "cpu_frequency_hertz", "cpu_frequency_hertz",
        "Mean clock frequency of the cores.", every_s=SLOW_S),
    _host("gauge", "load_average", "load.{window}",
        "Mean number of runnable and uninterruptible tasks, by window (1m, 5m, 15m)."),
    _host("counter", "pressure_waiting_seconds", "pressure.{resource}.some_s",
        "Time since boot in which at least one task waited for the resource (PSI `some`: cpu, "
        "memory, io)."),
    _host("counter", "pressure_stalled_seconds", "pressure.{resource}.full_s",
        "Time since boot in which all tasks waited for the resource (PSI `full`)."),
    _host("gauge", "memory_used_bytes", "ram_used_bytes",
        "Memory that programs use and that the kernel cannot free without swapping.",
        required=True),
    _host("gauge", "memory_size_bytes", "ram_total_bytes",
        "Size of the memory.", required=True),
    _host("gauge", "swap_used_bytes", "swap_used_bytes",
        "Swap space in use.", required=True),
    _host("gauge", "swap_size_bytes", "swap_total_bytes",
        "Size of the swap space."),
    _host("counter", "swap_read_bytes", "swapped_in_bytes",
        "Bytes swapped in since boot."),
    _host("counter", "swap_written_bytes", "swapped_out_bytes",
        "Bytes swapped out since boot."),
    _host("counter", "page_faults", "{kind}_page_faults",
        "Page faults since boot, by kind (minor, major).",
        label_values=("minor", "major"), every_s=SLOW_S),
    _host("counter", "disk_read_bytes", "disks.{device}.read_bytes",
        "Bytes read since boot, by whole disk."),
    _host("counter", "disk_written_bytes", "disks.{device}.written_bytes",
        "Bytes written since boot, by whole disk."),
    _host("counter", "disk_busy_seconds", "disks.{device}.busy_s",
        "Time since boot in which the disk had requests to serve."),
    _host("counter", "network_transmit_bytes", "networks.{device}.sent_bytes",
        "Bytes sent since boot, by interface; virtual interfaces of containers are left out."),
    _host("counter", "network_receive_bytes", "networks.{device}.received_bytes",
        "Bytes received since boot, by interface."),
    _host("counter", "network_dropped_packets", "networks.{device}.dropped_packets",
        "Packets dropped since boot in both directions, by interface."),
    _host("gauge", "temperature_celsius", "temperatures_celsius.{sensor}",
        "Temperature, by sensor.", every_s=SLOW_S),
    _cgroup("gauge", "cpu_limit_cores", "cpu_limit_cores",
        "Cores that the control group of the watched processes may use."),
    _cgroup("counter", "cpu_seconds", "cpu_s",
        "CPU time of the control group."),
    _cgroup("counter", "cpu_throttled_seconds", "throttled_s",
        "Time in which the CPU limit stopped tasks of the control group, summed over its CPUs."),
    _cgroup("counter", "cpu_throttled_periods", "throttled_periods",
        "Scheduling periods in which the CPU limit stopped the control group."),
    _cgroup("gauge", "memory_limit_bytes", "memory_limit_bytes",
        "Memory that the control group may use."),
    _cgroup("gauge", "memory_used_bytes", "memory_used_bytes",
        "Memory that the control group uses, including the page cache."),
    Metric("gpu", "info", HOST,
        "Name of the GPU; always 1.", "gpus.{gpu}.name",
        info_labels=("name",), every_s=SLOW_S),
    _gpu("utilization_ratio", "utilization_ratio",
        "Share of the last sampling period of the driver in which a kernel was running."),
    _gpu("memory_used_bytes", "memory_used_bytes",
        "GPU memory in use."),
    _gpu("memory_size_bytes", "memory_total_bytes",
        "Size of the GPU memory."),
    _gpu("power_watts", "power_watts",
        "Power draw of the GPU."),
    _gpu("sm_clock_hertz", "sm_clock_hertz",
        "Clock frequency of the multiprocessors."),
    _gpu("memory_clock_hertz", "memory_clock_hertz",
        "Clock frequency of the memory."),
    _gpu("temperature_celsius", "temperature_celsius",
        "Temperature of the GPU."),
)
# fmt: on


# Facts of a trial, as labels of `paceline_run_info`.
RUN_FACTS = (
    "trial",
    "workload",
    "launcher",
    "transport",
    "local_strategy",
    "nodes",
    "ranks",
    "repeat",
)


def _usage(kind: Kind, name: str, column: str, text: str, **more: Any) -> tuple[Metric, Metric]:
    """Return the same metric of the whole run and of each rank."""
    return (
        Metric(f"run_{name}", kind, RUN_PROCESSES, text, f"run_{column}", **more),
        Metric(f"rank_{name}", kind, RANK, text, column, **more),
    )


# fmt: off
_USAGE_METRICS = (
    _usage("gauge", "processes", "processes",
        "Live processes.", required=True),
    _usage("gauge", "threads", "threads",
        "Threads of the live processes.", required=True),
    _usage("counter", "cpu_seconds", "cpu_seconds",
        "CPU time since the trial's sidecar started, including ended processes. The time that a "
        "process used between the last tick and its end is included only if its parent is watched"
        " and waited for it.", required=True),
    _usage("gauge", "resident_memory_bytes", "rss_bytes",
        "Sum of the resident set sizes (RSS); shared pages count once for each process.",
        required=True),
    _usage("gauge", "proportional_memory_bytes", "pss_bytes",
        "Sum of the proportional set sizes (PSS); each shared page counts once. Read at the "
        "expensive interval."),
    _usage("counter", "context_switches", "{kind}_context_switches",
        "Context switches of all threads since the trial's sidecar started, by kind (voluntary, "
        "involuntary). Read at the expensive interval.",
        label_values=("voluntary", "involuntary")),
    _usage("counter", "read_bytes", "read_bytes",
        "Bytes read from storage since the trial's sidecar started."),
    _usage("counter", "written_bytes", "written_bytes",
        "Bytes written to storage since the trial's sidecar started."),
    _usage("gauge", "open_files", "open_files",
        "Open file descriptors. Read at the expensive interval."),
)
RUN_METRICS = (
    Metric("run", "info", RUN,
        "Facts of the trial; always 1.", info_labels=RUN_FACTS, in_trace=False),
    Metric("run_start_timestamp_seconds", "gauge", RUN,
        "Unix time at which the trial was launched.", in_trace=False),
)
# fmt: on
RUN_PROCESS_METRICS = tuple(run for run, _ in _USAGE_METRICS)
RANK_METRICS = tuple(rank for _, rank in _USAGE_METRICS)


def _sidecar(kind: Kind, name: str, text: str, **more: Any) -> Metric:
    return Metric(f"sidecar{name}", kind, SIDECAR, text, **more)


# fmt: off
SIDECAR_METRICS = (
    _sidecar("info", "",
        "Version of the sidecar; always 1.", info_labels=("version",), in_trace=False),
    _sidecar("gauge", "_interval_seconds",
        "Time between two samples.", in_trace=False),
    _sidecar("counter", "_restarts",
        "Times that the sidecar died and was started again.", in_trace=False),
    _sidecar("counter", "_samples",
        "Samples taken.", in_trace=False),
    _sidecar("counter", "_missed_samples",
        "Samples that could not be taken in time.", column="sidecar_missed_ticks"),
    _sidecar("counter", "_cpu_seconds",
        "CPU time of the sidecar.", required=True),
    _sidecar("gauge", "_resident_memory_bytes",
        "Resident memory of the sidecar.", column="sidecar_rss_bytes", required=True),
    _sidecar("gauge", "_last_sample_timestamp_seconds",
        "Unix time of the last sample.", column="unix_s", required=True),
)
# fmt: on


def facts_of(trial: Trial) -> dict[str, str]:
    """Return the facts of a trial by the labels in RUN_FACTS."""
    return {
        "trial": trial.id,
        "workload": trial.training.workload,
        "launcher": trial.launcher,
        "transport": trial.transport,
        "local_strategy": trial.local_strategy,
        "nodes": str(trial.placement.nodes),
        "ranks": str(trial.placement.ranks),
        "repeat": str(trial.repeat),
    }


def run_facts(facts: dict[str, str], launched_unix_s: float) -> Row:
    """Return the values of the run's metrics, which the trace does not repeat."""
    return {"run": facts, "run_start_timestamp_seconds": launched_unix_s}


def sidecar_facts(*, version: str | None, interval_s: float, restarts: int, samples: int) -> Row:
    """Return the values of the sidecar's metrics that the trace does not repeat."""
    return {
        "sidecar": version,
        "sidecar_interval_seconds": interval_s,
        "sidecar_restarts": restarts,
        "sidecar_samples": samples,
    }


def _training(kind: Kind, name: str, text: str, column: str = "") -> Metric:
    return Metric(name, kind, TRAINING, text, column, in_trace=False)


def _communication(name: str, text: str) -> Metric:
    column = f"operations.{{operation}}.{name}"
    return _training("counter", f"communication_{name}", text, column)


# fmt: off
TRAINING_METRICS = (
    _training("gauge", "rank_failed",
        "1 if the rank ended with an error, else 0."),
    _training("counter", "training_steps",
        "Steps that the rank finished."),
    _training("counter", "training_samples",
        "Samples of the rank's shares of the batches, without padding."),
    _training("gauge", "training_epoch",
        "Epoch of the last step, from 0."),
    _training("gauge", "training_loss",
        "Mean loss of the rank's samples in the last step."),
    _training("gauge", "training_last_step_timestamp_seconds",
        "Unix time at which the rank finished its last step."),
    _training("counter", "training_phase_seconds",
        "Time of the rank's steps, by phase: comm is exposed communication; bubble is a pipeline "
        "stage waiting for its neighbours.", "phases.{phase}"),
    _training("histogram", "training_step_seconds",
        "Duration of the rank's steps."),
    _communication("operations",
        "Finished operations of process groups, by operation."),
    _communication("payload_bytes",
        "Size of the tensors of these operations, by operation."),
    _communication("sent_bytes",
        "Bytes that the rank sent for these operations, by operation, where the transport counts "
        "them."),
    _communication("seconds",
        "Time from the request for an operation to its end, including time that overlaps with "
        "computation, by operation."),
)
# fmt: on

METRICS: tuple[Metric, ...] = (
    *HOST_METRICS,
    *RUN_METRICS,
    *RUN_PROCESS_METRICS,
    *RANK_METRICS,
    *TRAINING_METRICS,
    *SIDECAR_METRICS,
)
