"""Parameters, gradients and optimiser state in shards of all ranks (`sharded`): fully_shard."""
