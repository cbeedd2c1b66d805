"""What optimizers are given, and what torch.optim makes of it."""

import torch
import torch.utils._pytree as pytree
from _support import close

NUM_STEPS = 7  # RAdam changes its rule at the sixth


def tree_map(function, *trees):
    return pytree.tree_map(lambda *xs: None if xs[0] is None else function(*xs), *trees)


def tensors(tree):
    return [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]


def problem(name, seed=0, dtype=torch.float32, num_steps=NUM_STEPS):
    """Parameters of several ranks, with a None, and the gradients of a few steps."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    params = {"w": normal(3, 4), "rest": [normal(4), normal(), None]}
    if name == "Muon":
        params = {"w": normal(3, 4), "rest": [normal(5, 2), None]}
    grads = [tree_map(lambda x: normal(*x.shape), params) for _ in range(num_steps)]
    return params, grads


def with_torch(name, options, params, grads, lrs=None):
    """What torch.optim, or another class, makes of the parameters; the optimizer."""
    leaves = [leaf.clone() for leaf in tensors(params)]
    kind = getattr(torch.optim, name) if isinstance(name, str) else name
    optimizer = kind(leaves, **options)
    for number, grad in enumerate(grads):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if lrs is None else lrs[number]
        for leaf, g in zip(leaves, tensors(grad), strict=True):
            leaf.grad = g.clone()
        optimizer.step()
    return leaves, optimizer


def run(init, update, params, grads):
    state = init(params)
    for grad in grads:
        params, state = update(grad, state, params)
    return params, state


def assert_equal(params, expected, name=""):
    # Muon rounds to bfloat16 in each of its five matrix products.
    tolerance = {"rtol": 0, "atol": 0.03} if name == "Muon" else {"rtol": 1e-5, "atol": 2e-6}
    close(tensors(params), expected, **tolerance)


def members(name, count, **options):
    """Several problems: stacked parameters, stacked gradients, and each problem."""
    problems = [problem(name, seed, **options) for seed in range(count)]
    params, *grads = (
        tree_map(lambda *xs: torch.stack(xs), *trees)
        for trees in zip(*([params, *grads] for params, grads in problems), strict=True)
    )
    return params, grads, problems
