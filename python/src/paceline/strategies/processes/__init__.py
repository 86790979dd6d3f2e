"""Strategy `processes`: replicas in processes that share memory."""
