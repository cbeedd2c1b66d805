"""Covers: _sharded/strides.py: strides, and the derivatives that torch takes by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _sharded_values import HERE, numbers, on_devices

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

Function = Callable[[torch.Tensor], Any]

VIEWS: dict[str, Function] = {
    "itself": lambda x: x,
    "transpose": lambda x: x.transpose(0, 2),
    "T": lambda x: x.mT,
    "row": lambda x: x[0],
    "rows": lambda x: x[1:3],
    "every other row": lambda x: x[::2],
    "index": lambda x: x[..., -1],
    "narrow": lambda x: x.narrow(2, 1, 2),
    "newaxis": lambda x: x[:, None],
    "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(4, 3, 2)[1:, 1],
    "unbind": lambda x: x.unbind(1)[1],
    "split": lambda x: x.split([1, 2], 2)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "diagonal": lambda x: x.diagonal(1, 0, 2),
    "view of a view": lambda x: x.transpose(1, 2)[:, 1].unsqueeze(0),
    "view of a detached": lambda x: x.detach().mT[:, 0],
    "reshape": lambda x: x.reshape(6, 4).t()[1:3],
    "copy by reshape": lambda x: x.transpose(0, 1).reshape(8, 3)[1:4],
    "as_strided": lambda x: x.as_strided((3, 2), (6, 1), 1),
    "as_strided of a transpose": lambda x: x.mT.as_strided((3, 2), (6, 1), 1),
    "as_strided of a part": lambda x: x[1:].as_strided((2, 2), (6, 1)),
    "complex": lambda x: torch.view_as_complex(x.view(4, 3, 2))[1:],
    "conjugate of a part": lambda x: torch.view_as_complex(x.view(4, 3, 2))[1:].conj()[:, 1:],
}


def push(f: Function) -> Function:
    return lambda x: torch.func.jvp(f, (x,), (x * 0.5 + 1,))


def pull(f: Function) -> Function:
    def pulled(x: torch.Tensor) -> Any:
        y, back = torch.func.vjp(f, x)
        return y, *back(y * 0.1 + 1)

    return pulled


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "vjp": pull,
    "jvp": push,
    "vjp of vjp": lambda f: pull(lambda x: pull(f)(x)[1]),
    "jvp of vjp": lambda f: push(lambda x: pull(f)(x)[1]),
    "vjp of jvp": lambda f: pull(lambda x: push(f)(x)[1]),
    "jvp of jvp": lambda f: push(lambda x: push(f)(x)[1]),
    "jacrev": lambda f: lambda x: (torch.func.jacrev(f)(x),),
    "jacfwd": lambda f: lambda x: (torch.func.jacfwd(f)(x),),
    "functionalize": lambda f: pull(torch.func.functionalize(f)),
    "vmap in vjp": lambda f: pull(lambda x: torch.func.vmap(f)(torch.stack([x, x * 2]))),
    "vjp in vmap": lambda f: (
        lambda x: torch.func.vmap(pull(f), in_dims=2)(torch.stack([x, x * 2], 2))
    ),
}

BASES: dict[str, Function] = {
    "a copy": lambda x: x.clone(),
    "transposed": lambda x: (x.transpose(0, 2) * 1).transpose(0, 2) * 1,
    "a part": lambda x: torch.stack([x, x * 2])[1],
}


def squared_part(view: Function, base: Function) -> Function:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = base(x)
        early, part = view(y), view(y)
        part.mul_(part + 2)
        early.add_(x.sum())
        return y.sin() + early.abs().sum()

    return f


def outcome(f: Function, x: torch.Tensor) -> Any:
    try:
        return f(x)
    except RuntimeError as error:
        return error


@pytest.mark.sampled(7)
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_writes_to_views_have_torchs_derivatives(transform, view, base):
    f = transform(squared_part(view, base))
    x = HERE.x / 4
    expected = outcome(f, x)
    for put in (lambda x: tp.device_put(x, tp.devices()), tp.replicate):
        got = outcome(f, put(x))
        if isinstance(expected, RuntimeError):
            assert isinstance(got, RuntimeError)
            continue
        for mine, right in zip(got, expected, strict=True):
            torch.testing.assert_close(mine.cpu(), right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_have_torchs_strides(view):
    here, there = view(HERE.x[:]), view(on_devices().x[:])
    if type(there) is torch.Tensor:
        return  # a single row is a copy
    for mine, right in ((there, here), (there.detach(), here), (there.clone(), here.clone())):
        assert (mine.stride(), mine.storage_offset()) == (right.stride(), right.storage_offset())
        assert mine.is_contiguous() == right.is_contiguous()
    if not here.is_complex():
        assert (there * 2).stride() == (here * 2).stride()
        assert torch.zeros_like(there).stride() == torch.zeros_like(here).stride()
    assert there.contiguous().is_contiguous()


def test_reshape_is_a_copy_where_it_is_one_in_torch():
    x = on_devices().x
    x.mT.reshape(-1).zero_()
    (x.mT * 1).reshape(-1).zero_()
    assert x.tolist() == HERE.x.tolist()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        x.mT.view(-1)
    x.mT.contiguous().view(-1).zero_()
    assert x.tolist() == HERE.x.tolist()
    x.mT.mT.reshape(-1).zero_()
    assert not x.cpu().any()


def test_gradients_with_other_strides_stay_on_the_devices():
    x = on_devices().x.mT.detach().requires_grad_()
    (x * numbers(4, 3, 2)).sum().backward()
    assert type(x.grad) is tp.ShardedTensor
    assert x.grad.stride() == x.stride()
    assert x.grad.tolist() == numbers(4, 3, 2).tolist()


def test_a_tensor_that_names_another_value_keeps_the_views_of_the_first():
    x, y = on_devices().x, tp.device_put(numbers(3, 2, 4), tp.devices()[:3])
    part = x.mT[:, 1:]
    x.data = y
    part.fill_(1)
    assert part.stride() == (6, 1, 3)
    assert set(part.cpu().flatten().tolist()) == {1}
    assert x.tolist() == numbers(3, 2, 4).tolist()


def test_the_memory_of_a_deleted_tensor_is_unknown():
    x = on_devices().x
    part = x[:, 1]
    x.delete()
    with pytest.raises(RuntimeError, match="a view of a ShardedTensor that has been deleted"):
        part.as_strided((2,), (1,))
