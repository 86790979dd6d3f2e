"""Words of the core keys of a spec; extensions add their own. Their meaning is in the glossary."""

from typing import Literal

Device = Literal["cpu", "cuda"]
Precision = Literal["fp32", "bf16"]
MemoryFormat = Literal["contiguous", "channels_last"]
BatchNorm = Literal["global", "per-replica"]
ReadingMode = Literal["memory", "stream"]
BEST = "best"  # a local strategy that a search has to find first
# The trial that every speedup is relative to: one process, one thread, no launcher.
BASELINE = {"launcher": "local", "local_strategy": "sequential"}
DEFAULT_EPOCHS = 1
