"""Runtimes store blocks on devices and run plans there: in worker processes, or under torchrun."""
