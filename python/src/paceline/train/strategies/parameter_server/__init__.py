"""Parameter server: weights in shards on the ranks, updated with or without a barrier."""
