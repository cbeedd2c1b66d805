"""Stored results of JAX programs, and what is needed to run those programs on torchpmap."""
