"""StageReplicas in threads of one process."""
