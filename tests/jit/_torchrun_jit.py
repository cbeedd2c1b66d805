"""Steps of ``jit`` in four processes, beside plain torch; ``test_jit_training.py`` runs it."""

import torch
from _cases import data
from _models import LAYOUTS
from test_jit_training import TRAININGS, check_training
from test_jit_transforms import AROUND, PLACES, f, jit
from torch.utils._pytree import tree_leaves

import torchpmap as tp


def whole(value: torch.Tensor) -> torch.Tensor:
    return tp.multihost.all_gather(value.detach())


def main() -> None:
    for kind in ("network", "transformer"):
        for layout in LAYOUTS:
            for train, make, atol in TRAININGS.values():
                check_training(kind, layout, train, make, atol=atol, whole=whole)
    w, x = data(0), data(1)
    for name in ("grad", "jvp of grad", "gradients of rows"):
        mine = AROUND[name](jit(f), PLACES["columns"](w), PLACES["rows"](x))
        for a, b in zip(tree_leaves(mine), tree_leaves(AROUND[name](f, w, x)), strict=True):
            torch.testing.assert_close(whole(a), b, rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    main()
