"""One small class per launcher: trial -> argv; supervision, time limits, and which rank failed."""
