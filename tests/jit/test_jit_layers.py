"""Covers: layers whose rows and channels are independent keep them where they are, in both passes.

What is right is what plain torch gives for the whole values.
"""

import pytest
import torch
import torch.nn.functional as F
from _support import EAGER

import torchpmap as tp
from torchpmap import P

pytestmark = pytest.mark.usefixtures("pool")

LINES, PICTURES, VOLUMES = (4, 4, 6), (4, 4, 6, 6), (4, 4, 4, 4, 4)
LAYERS = {
    "avg_pool1d": (LINES, lambda x: F.avg_pool1d(x, 2)),
    "max_pool1d": (LINES, lambda x: F.max_pool1d(x, 2)),
    "reflection_pad1d": (LINES, lambda x: F.pad(x, (1, 1), "reflect")),
    "replication_pad1d": (LINES, lambda x: F.pad(x, (1, 1), "replicate")),
    "nearest1d": (LINES, lambda x: F.interpolate(x, scale_factor=2)),
    "linear1d": (LINES, lambda x: F.interpolate(x, size=9, mode="linear")),
    "nearest2d": (PICTURES, lambda x: F.interpolate(x, scale_factor=2)),
    "nearest_exact2d": (PICTURES, lambda x: F.interpolate(x, size=5, mode="nearest-exact")),
    "bilinear2d": (PICTURES, lambda x: F.interpolate(x, size=9, mode="bilinear")),
    "bicubic2d": (PICTURES, lambda x: F.interpolate(x, size=9, mode="bicubic")),
    "bilinear2d_aa": (
        PICTURES,
        lambda x: F.interpolate(x, size=4, mode="bilinear", antialias=True),
    ),
    "pixel_shuffle": (PICTURES, lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": (PICTURES, lambda x: F.pixel_unshuffle(x, 2)),
    "unfold": (PICTURES, lambda x: F.unfold(x, 3, padding=1)),
    "fold": ((4, 12, 9), lambda x: F.fold(x, 4, 2)),
    "grid_sample": (
        PICTURES,
        lambda x: F.grid_sample(x, x.tanh().view(4, 3, 24, 2), align_corners=False),
    ),
    "avg_pool3d": (VOLUMES, lambda x: F.avg_pool3d(x, 2)),
    "max_pool3d": (VOLUMES, lambda x: F.max_pool3d(x, 2)),
    "adaptive_avg_pool3d": (VOLUMES, lambda x: F.adaptive_avg_pool3d(x, 2)),
    "adaptive_max_pool3d": (VOLUMES, lambda x: F.adaptive_max_pool3d(x, 2)),
    "reflection_pad3d": (VOLUMES, lambda x: F.pad(x, (1,) * 6, "reflect")),
    "replication_pad3d": (VOLUMES, lambda x: F.pad(x, (1,) * 6, "replicate")),
    "nearest3d": (VOLUMES, lambda x: F.interpolate(x, scale_factor=2)),
    "trilinear3d": (VOLUMES, lambda x: F.interpolate(x, size=5, mode="trilinear")),
}
ROWS_ONLY = {"pixel_shuffle", "pixel_unshuffle", "unfold", "fold", "grid_sample"}
"""Their channels are not independent, or their rule does not say so."""


def both(layer):
    """(x, weights of the result) -> the result and a gradient."""

    def f(x, w):
        x = x.detach().requires_grad_()
        y = layer(x)
        (y * w).sum().backward()
        return y.detach(), x.grad

    return f


@pytest.mark.parametrize("name", LAYERS)
def test_rows_and_channels_stay_where_they_are(name):
    shape, layer = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    w = torch.randn(layer(x).shape, generator=generator, dtype=torch.float64)
    expected = both(layer)(x, w)
    mesh = tp.make_mesh((2, 2), ("x", "y"))
    spec = P("x") if name in ROWS_ONLY else P("x", "y")
    there = [tp.device_put(value, tp.NamedSharding(mesh, spec)) for value in (x, w)]
    step = tp.jit(both(layer), compile=EAGER, fullgraph=True)
    assert not step.lower(*there).resharded
    for mine, right in zip(step(*there), expected, strict=True):
        torch.testing.assert_close(mine.cpu(), right, atol=1e-12, rtol=0)
