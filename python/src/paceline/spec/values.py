"""The words a spec may use; their meaning is in docs/words.md."""

from typing import Literal

WorkloadName = Literal["complex-small", "simple-big", "tiny"]
Launcher = Literal["local", "torchrun", "mpi", "spark"]
Transport = Literal["none", "gloo", "mpi"]
LocalStrategy = Literal["sequential", "intraop", "processes"]
Precision = Literal["fp32", "bf16"]
MemoryFormat = Literal["contiguous", "channels_last"]
ReadingMode = Literal["memory", "stream"]
