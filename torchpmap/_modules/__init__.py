"""``nn.Module`` on devices: replicated in place, fed with cut batches, or as a pure function."""
