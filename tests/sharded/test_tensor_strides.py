"""Covers: _sharded/strides.py: strides, and the derivatives that torch takes by them."""

import pytest
import torch
import torch.nn.functional as F
from _sharded_values import HERE, each, nothing_gathers, numbers, on_devices, on_mesh
from _support import close

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

VIEWS = """
    x; x.transpose(0, 2); x.mT; x[0]; x[1:3]; x[::2]; x[..., -1]; x.narrow(2, 1, 2); x[:, None]
    x.flatten(1); x.view(4, 3, 2)[1:, 1]; x.unbind(1)[1]; x.split([1, 2], 2)[1]; x.chunk(2, 1)[0]
    x.diagonal(1, 0, 2); x.transpose(1, 2)[:, 1].unsqueeze(0); x.detach().mT[:, 0]
    x.reshape(6, 4).t()[1:3]; x.transpose(0, 1).reshape(8, 3)[1:4]; x.as_strided((3, 2), (6, 1), 1)
    x.mT.as_strided((3, 2), (6, 1), 1); x[1:].as_strided((2, 2), (6, 1))
    torch.view_as_complex(x.view(4, 3, 2))[1:]
    torch.view_as_complex(x.view(4, 3, 2))[1:].conj()[:, 1:]
"""


def push(f):
    return lambda x: torch.func.jvp(f, (x,), (x * 0.5 + 1,))


def pull(f):
    def pulled(x):
        y, back = torch.func.vjp(f, x)
        return y, *back(y * 0.1 + 1)

    return pulled


TRANSFORMS = {
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
BASES = {
    "a copy": lambda x: x.clone(),
    "transposed": lambda x: (x.transpose(0, 2) * 1).transpose(0, 2) * 1,
    "a part": lambda x: torch.stack([x, x * 2])[1],
}


def squared_part(view, base):
    def f(x):
        y = base(x)
        early, part = view(y), view(y)
        part.mul_(part + 2)
        early.add_(x.sum())
        return y.sin() + early.abs().sum()

    return f


def outcome(f, x):
    try:
        return f(x)
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@each("view", "x", VIEWS)
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
        close(got, expected, rtol=1e-4, atol=1e-4)


@each("view", "x", VIEWS)
def test_views_have_torchs_strides(view):
    here, there = view(HERE.x[:]), view(on_devices().x[:])
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


ORDERED = """
    x.rot90(); x.rot90(-1); x.T.flip(0); x.T.sort(0)[0]; x.T.argsort(0); torch.cat([x.T, x.T])
    x.T.index_fill(0, torch.tensor([1]), 3.0); torch.frexp(x.T)[0]; x.T.roll(1, 0); x.T.softmax(0)
    x.T.index_put((torch.tensor([1]),), torch.tensor(3.0)); x.T.cumsum(0); x.T.clamp(0)
    x.T.gather(0, torch.zeros(6, 4, dtype=torch.int64))
"""
places = pytest.mark.parametrize("put", [tp.shard_batch, tp.replicate], ids=["cut", "whole"])


@places
@each("f", "x", ORDERED)
def test_results_are_ordered_in_memory_as_those_of_torch(f, put):
    result, expected = f(put(numbers(4, 6))), f(numbers(4, 6))
    assert result.stride() == expected.stride()
    torch.testing.assert_close(result.cpu(), expected)


FORMATS = """
    x.to(memory_format=last); x.to(torch.float64, memory_format=last)
    x.contiguous(memory_format=last); x.clone(memory_format=last)
    torch.zeros_like(x, memory_format=last); torch.full_like(x, 2.0, memory_format=last)
    x.to(memory_format=last).relu(); x.to(memory_format=last).contiguous()
    x[None].to(memory_format=torch.channels_last_3d); F.max_pool2d(x.to(memory_format=last), 2)
    x.to(memory_format=last).permute(0, 2, 3, 1).reshape(-1); x.to(memory_format=last) + x
"""


@places
@each("f", "x, last=torch.channels_last", FORMATS)
def test_channels_last_stays_on_the_devices(f, put):
    value = numbers(4, 3, 4, 6)
    with nothing_gathers():
        result = f(put(value))
    assert result.stride() == f(value).stride()
    torch.testing.assert_close(result.cpu(), f(value))


def test_a_module_in_channels_last():
    last = torch.channels_last
    module = tp.replicate(torch.nn.Conv2d(3, 2, 2)).to(memory_format=last)
    with nothing_gathers():
        module(tp.shard_batch(numbers(4, 3, 4, 6)).to(memory_format=last)).sum().backward()
    assert module.weight.is_contiguous(memory_format=last)


KEEP_CHANNELS_LAST = {
    "pixel_shuffle": (4, lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": (4, lambda x: F.pixel_unshuffle(x, 2)),
    "reflection_pad2d": (4, lambda x: F.pad(x, (1,) * 4, "reflect")),
    "replication_pad2d": (4, lambda x: F.pad(x, (1,) * 4, "replicate")),
    "adaptive_avg_pool2d": (4, lambda x: F.adaptive_avg_pool2d(x, 2)),
    "adaptive_max_pool2d": (4, lambda x: F.adaptive_max_pool2d(x, 2)),
    "bicubic": (4, lambda x: F.interpolate(x, size=6, mode="bicubic")),
    "antialiased": (4, lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True)),
    "nearest-exact": (4, lambda x: F.interpolate(x, size=6, mode="nearest-exact")),
    "reflection_pad3d": (5, lambda x: F.pad(x, (1,) * 6, "reflect")),
    "replication_pad3d": (5, lambda x: F.pad(x, (1,) * 6, "replicate")),
    "max_pool3d": (5, lambda x: F.max_pool3d(x, 2)),
    "avg_pool3d": (5, lambda x: F.avg_pool3d(x, 2)),
    "nearest3d": (5, lambda x: F.interpolate(x, size=6)),
    "trilinear": (5, lambda x: F.interpolate(x, size=6, mode="trilinear")),
}


@pytest.mark.parametrize("name", KEEP_CHANNELS_LAST)
def test_channels_stay_last(name):
    """Whether ``flatten`` is a view depends on it, and so what a write to it changes."""
    ndim, layer = KEEP_CHANNELS_LAST[name]
    last = torch.channels_last if ndim == 4 else torch.channels_last_3d
    whole = torch.randn(4, 8, *[4] * (ndim - 2), generator=torch.Generator().manual_seed(0))
    mine, right = (layer(x.to(memory_format=last)) for x in (tp.shard_batch(whole), whole))
    assert mine.stride() == right.stride()
    for y in (mine, right):
        y.flatten(1).clamp_(min=0)
    torch.testing.assert_close(mine.cpu(), right)


@each("f", "x", "torch.det(x); torch.logdet(x); torch.linalg.slogdet(x)[1]")
@each("part", "x", "x[..., :4]; x[..., ::2]; x[..., 4:].mT")
@pytest.mark.parametrize("spec", ["i", (None, "i"), ()], ids=str)
def test_determinant_of_a_part(f, part, spec):
    """torch factorizes a contiguous matrix transposed, and asks the matrix in the backward pass."""
    whole = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine, right = on_mesh(whole, spec, (2,)).requires_grad_(), whole.clone().requires_grad_()
    for x in (mine, right):
        f(part(x)).nan_to_num().sum().backward()
    torch.testing.assert_close(mine.grad.cpu(), right.grad, equal_nan=True)
