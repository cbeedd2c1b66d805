"""Loops and branches whose body is traced once, with the signatures and rules of ``jax.lax``."""

from torchpmap._loops.associative import associative_scan
from torchpmap._loops.branches import cond, switch
from torchpmap._loops.scan import map, scan
from torchpmap._loops.while_loop import fori_loop, while_loop

__all__ = ["associative_scan", "cond", "fori_loop", "map", "scan", "switch", "while_loop"]
