"""Whole programs written for JAX, and the same programs for torchpmap.

``NAME_jax.py`` is a program in JAX, which the tests neither import nor need: run by
``python tests/programs/real/NAME_jax.py`` where jax is installed, it writes ``NAME.json``, the
numbers of its run. ``NAME_torch.py`` is its port. Both begin from ``inputs.py``.
"""
