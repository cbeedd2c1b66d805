"""What the tests of shard_map share: a matrix, cut along both axes of the mesh of conftest.py."""

import torch
from _support import EAGER

import torchpmap as tp

X = torch.arange(16.0).reshape(4, 4)
XY = tp.P("x", "y")


def mapped(fun, mesh, in_specs, out_specs, **options):
    options.setdefault("compile", EAGER)
    return tp.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
