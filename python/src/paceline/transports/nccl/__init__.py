"""Transport `nccl`."""
