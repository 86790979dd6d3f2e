"""The words a spec may use; their meaning is in docs/reference/glossary.md."""

from typing import Literal, get_args

WorkloadName = Literal["complex-small", "simple-big", "tiny"]
Launcher = Literal["local", "torchrun", "mpi", "spark"]
Transport = Literal["none", "shared", "gloo", "mpi", "nccl", "spark-rounds", "spark-allgather"]
# How transport mpi reduces what lies on several nodes (or what it cannot share the memory of).
Algorithm = Literal[
    "auto",
    "native",  # MPI's own
    "ring",
    "recursive-doubling",
    "rabenseifner",
    "hierarchical",
    "naive",
    "parameter-server",
]
Compression = Literal["bf16", "fp16", "powersgd", "topk", "terngrad", "int8"]
LocalStrategy = Literal["sequential", "intraop", "threads", "processes", "pipeline", "hybrid"]
LOCAL_STRATEGIES: tuple[LocalStrategy, ...] = get_args(LocalStrategy)
# What a trial may ask for: "best" is the workload's fastest in the search of [tune].
StrategyRequest = Literal[LocalStrategy, "best"]
# How gradients of several nodes with several replicas each are averaged.
Reduction = Literal["flat", "hierarchical"]
PipelineSchedule = Literal["gpipe", "1f1b"]
Balance = Literal["time", "size"]
Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]
MemoryFormat = Literal["contiguous", "channels_last"]
ReadingMode = Literal["memory", "stream"]
