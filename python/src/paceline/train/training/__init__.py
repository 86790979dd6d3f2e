"""Building blocks that strategies, transports and workloads share."""
