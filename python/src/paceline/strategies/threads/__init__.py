"""Strategy `threads`: replicas in threads of one process."""
