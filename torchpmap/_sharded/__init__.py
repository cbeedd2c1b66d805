"""``ShardedTensor``: values on the devices, the torch operations on them, and moving them."""
