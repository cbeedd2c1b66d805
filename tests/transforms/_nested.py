"""What the tests of a pmap of a pmap share: mapping over rows and columns, on eight devices."""

import numpy as np
from _support import EAGER

import torchpmap as tp

NAMES = ("rows", "cols")


def nested(f, inner=None, **outer):
    return tp.pmap(tp.pmap(f, "cols", **(inner or {})), "rows", **{"compile": EAGER, **outer})


def mesh_of(y):
    return dict(y.sharding.mesh.shape)


def same(got, expected):
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-12, atol=1e-12)
