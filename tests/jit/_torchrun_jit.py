"""Steps of ``jit`` in four processes, beside plain torch; ``test_jit_training.py`` runs it."""

import functools

import torch
from _cases import data
from _models import LAYOUTS, cut, made, placed
from test_jit_outside import train as train_outside
from test_jit_training import adamw, train
from test_jit_transforms import AROUND, PLACES, f
from test_jit_transforms import jit as jitted
from torch.utils._pytree import tree_leaves

import torchpmap as tp


def main() -> None:
    for kind in ("network", "transformer"):
        plain = made(kind)
        expected, _ = train(kind, plain, adamw(plain))
        for layout in LAYOUTS:
            model = placed(made(kind), layout)
            losses, step = train(
                kind,
                model,
                adamw(model),
                lambda step: tp.jit(step, compile={"backend": "eager"}, fullgraph=True),
                lambda batch, layout=layout: cut(batch, layout),
            )
            torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
            assert step.num_traces == 1
            for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
                whole = tp.multihost.all_gather(mine.detach())
                torch.testing.assert_close(whole, right.detach(), atol=1e-8, rtol=0)
            jit = functools.partial(tp.jit, compile={"backend": "eager"}, fullgraph=True)
            model, put = placed(made(kind), layout), functools.partial(cut, layout=layout)
            losses, _ = train_outside(kind, model, jit, put)
            expected_outside, _ = train_outside(kind, made(kind))
            torch.testing.assert_close(losses, expected_outside, rtol=1e-12, atol=0)
    w, x = data(0), data(1)
    for name in ("grad", "jvp of grad", "gradients of rows"):
        mine = AROUND[name](jitted(f), PLACES["columns"](w), PLACES["rows"](x))
        right = tree_leaves(AROUND[name](f, w, x))
        for a, b in zip(tree_leaves(mine), right, strict=True):
            torch.testing.assert_close(tp.multihost.all_gather(a), b, rtol=1e-12, atol=1e-12)


if __name__ == "__main__":
    main()
