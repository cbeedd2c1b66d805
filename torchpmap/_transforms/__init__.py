"""The front ends: ``pmap``, ``grad`` and ``vmap``."""
