"""What the ports of JAX's ``tests/pmap_test.py`` share.

A test checks what the JAX test of the same name checks, ``testGatherTiled`` being
``test_gather_tiled``; where the name differs a docstring begins with the JAX name. Expectations are
NumPy's, torch's on the whole array, or mathematics.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from _support import EAGER

import torchpmap as tp

pmap = functools.partial(tp.pmap, compile=EAGER)


def on_host(x: Any) -> torch.Tensor:
    if isinstance(x, tp.ShardedTensor):
        return x.to_host()
    return torch.as_tensor(np.asarray(x) if isinstance(x, np.generic) else x)


def same(result: Any, expected: Any, **tolerances: float) -> None:
    """Shapes and values agree; dtypes too, unless the expectation is of Python numbers."""
    got, wanted = on_host(result).detach(), on_host(expected).detach()
    check_dtype = isinstance(expected, torch.Tensor | np.ndarray | np.generic)
    torch.testing.assert_close(got, wanted, check_dtype=check_dtype, **tolerances)


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def counting(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


def strided(n: int) -> list[list[int]]:
    return [list(range(n))[::2], list(range(n))[1::2]]


def rows(*counts: int) -> Any:
    """A fixture: the number of rows of a test that runs with each of these."""
    ids = [f"{count} rows" for count in counts]
    return pytest.fixture(params=counts, ids=ids)(lambda request: request.param)


def check_grads(f: Any, *args: torch.Tensor, order: int = 2, forward: bool = False) -> None:
    """Derivatives against finite differences, in float64."""
    inputs = tuple(x.double().requires_grad_() for x in args)
    assert torch.autograd.gradcheck(f, inputs, check_forward_ad=forward, fast_mode=True)
    if order > 1:
        assert torch.autograd.gradgradcheck(f, inputs, fast_mode=True)
