"""The same values on 2 x 3 and on 3 x 2 devices: test_meshes_that_have_no_grid_in_common."""

import torch

import torchpmap as tp
from torchpmap import P

tp.init()
x = torch.arange(36.0).reshape(6, 6)
a, b = (
    tp.device_put(x, tp.NamedSharding(tp.make_mesh(sizes, ("x", "y")), P("x", "y")))
    for sizes in ((2, 3), (3, 2))
)
results = [a + b, b - a, a @ b, a.clone().mul_(b), torch.cat([b, a])]
expected = [x + x, x - x, x @ x, x * x, torch.cat([x, x])]
for got, right in zip(results, expected, strict=True):
    torch.testing.assert_close(tp.multihost.all_gather(got), right)
