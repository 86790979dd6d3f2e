"""Facts about a machine: cores, control groups, processes, installed tools."""
