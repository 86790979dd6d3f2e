"""StageReplicas in processes that share memory."""
