"""Steps of ``jit`` in four processes, beside plain torch; ``test_jit_training.py`` runs it."""

import pytest
import torch
import torch.nn.functional as F
from _cases import data
from _models import LAYOUTS
from test_jit_training import TRAININGS, check_training
from test_jit_transforms import AROUND, PLACES, f, jit
from torch.utils._pytree import tree_leaves

import torchpmap as tp


def whole(value: torch.Tensor) -> torch.Tensor:
    return tp.multihost.all_gather(value.detach())


def check_refusals() -> None:
    """What processes give differently would make copies that differ."""
    rank, w = tp.multihost.process_index(), PLACES["columns"](data(0))
    own = torch.full((8, 8), float(rank), dtype=torch.float64)
    torch.manual_seed(rank)
    for name, call in {
        r"argument args\[1\]": lambda: jit(torch.mul)(w, own),
        "a tensor that it closes over": lambda: jit(lambda w: w * own)(w),
        "the seed of its random numbers": lambda: jit(lambda w: F.dropout(w, 0.5))(w),
    }.items():
        with pytest.raises(ValueError, match=name + r" \(input \d\) must be the same in all pro"):
            call()
    torch.manual_seed(0)


def main() -> None:
    check_refusals()
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
