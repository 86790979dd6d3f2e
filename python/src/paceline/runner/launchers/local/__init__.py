"""Start ranks on this node without a launcher."""
