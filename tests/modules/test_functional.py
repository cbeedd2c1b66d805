"""Covers: _modules/functional.py: modules as pure functions; batch norms of the whole batch."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from _support import EAGER
from torch import nn

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)) * 2 + 1
Y = torch.arange(8) % 3


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def trained(module, x, y):
    """Loss, gradients and new buffers of one step of plain torch."""
    module = copy.deepcopy(module)
    loss = F.cross_entropy(module(x), y)
    loss.backward()
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return loss.detach(), grads, dict(module.named_buffers())


def close(result, expected):
    assert result.keys() == expected.keys()
    for name, right in expected.items():
        torch.testing.assert_close(result[name].cpu(), right, rtol=1e-4, atol=1e-6, msg=name)


def check_step(loss, grads, new, expected):
    torch.testing.assert_close(loss.cpu(), expected[0])
    close(grads, expected[1])
    close(new, expected[2])


def step_of(apply, **options):
    def step(params, buffers, x, y):
        def loss(params):
            logits, new = apply(params, buffers, x)
            return F.cross_entropy(logits, y), new

        return tp.value_and_grad(loss, has_aux=True, **options)(params)

    return step


def test_one_device():
    module = make()
    before = copy.deepcopy(module.state_dict())
    params, buffers, apply = tp.functional(module)
    (loss, new), grads = step_of(apply)(params, buffers, X, Y)
    check_step(loss, grads, new, trained(module, X, Y))
    close(module.state_dict(), before)
    close(buffers, {name: before[name] for name in buffers})


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_mapped_batch_norms_see_the_whole_batch(mode, rows):
    module = make()
    params, buffers, apply = tp.functional(module, axis_name="i")
    step = step_of(apply, mean_over="i")
    mapped = tp.pmap(step, "i", in_axes=(None, None, 0, 0), out_axes=None, compile=mode)
    cut = X.unflatten(0, (rows, -1)), Y.unflatten(0, (rows, -1))
    (loss, new), grads = mapped(params, buffers, *cut)
    check_step(loss, grads, new, trained(module, X, Y))


@pytest.mark.parametrize("length", [5, 7, 8])
@pytest.mark.long("7")
def test_a_mask_leaves_rows_out(length):
    module = make()
    params, buffers, apply = tp.functional(module, axis_name="i")

    def mean_loss(params, buffers, x, y, mask):
        logits, new = apply(params, buffers, x, batch_mask=mask)
        losses = F.cross_entropy(logits, y, reduction="none") * mask
        return tp.psum(losses.sum(), "i") / tp.psum(mask.sum(), "i"), new

    def step(params, *batch):
        return tp.value_and_grad(mean_loss, has_aux=True, mean_over="i")(params, *batch)

    in_axes = (None, None, 0, 0, 0)
    batch, mask = tp.shard_batch((X[:length], Y[:length]), stacked=True)
    mapped = tp.pmap(step, "i", in_axes=in_axes, out_axes=None, compile=EAGER)
    (loss, new), grads = mapped(params, buffers, *batch, mask)
    expected = trained(module, X[:length], Y[:length])
    check_step(loss, grads, new, expected)

    # by backward(), through the mapped function
    leaves = {name: tp.replicate(p).requires_grad_() for name, p in params.items()}
    mapped = tp.pmap(mean_loss, "i", in_axes=in_axes, out_axes=None, compile=EAGER)
    mapped(leaves, buffers, *batch, mask)[0].backward()
    close({name: p.grad for name, p in leaves.items()}, expected[1])


def test_without_an_axis_each_row_of_a_vmap_has_its_own_statistics():
    module = make()
    params, buffers, apply = tp.functional(module)
    rows = X.unflatten(0, (2, 4)), Y.unflatten(0, (2, 4))
    (_, new), grads = tp.vmap(step_of(apply), in_axes=(None, None, 0, 0))(params, buffers, *rows)
    for k in range(2):
        _, expected_grads, expected_buffers = trained(module, rows[0][k], rows[1][k])
        close({name: value[k] for name, value in grads.items()}, expected_grads)
        statistics = ("1.running_mean", "1.running_var")
        close({x: new[x][k] for x in statistics}, {x: expected_buffers[x] for x in statistics})


def test_evaluation_changes_nothing():
    module = make()
    params, buffers, apply = tp.functional(module, axis_name="i")
    module.eval()
    mapped = tp.pmap(apply, "i", in_axes=(None, None, 0), out_axes=(0, None), compile=EAGER)
    y, new = mapped(params, buffers, X.unflatten(0, (4, 2)))
    torch.testing.assert_close(y.cpu().flatten(0, 1), module(X).detach())
    close(new, {name: value.clone() for name, value in buffers.items()})


def test_frozen_parameters_are_not_trained():
    module = make()
    module[0].requires_grad_(False)
    params, buffers, apply = tp.functional(module)
    assert list(params) == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert {"0.weight", "0.bias"} < buffers.keys()
    (_, new), grads = step_of(apply)(params, buffers, X, Y)
    assert new["0.weight"] is buffers["0.weight"]
    close(grads, trained(module, X, Y)[1])
    twin = make()
    twin.load_state_dict({**params, **new}, strict=False)
    close(dict(twin.named_buffers()), trained(module, X, Y)[2])


class Shared(nn.Module):
    """One batch norm used twice, and a buffer that is assigned anew."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count = self.count + 1
        return self.norm(self.norm(x) * 3)


def test_what_a_module_writes_comes_back():
    module = Shared()
    params, buffers, apply = tp.functional(module)
    y, new = apply(params, buffers, X)
    twin = copy.deepcopy(module)
    torch.testing.assert_close(y, twin(X).detach())
    close(new, dict(twin.named_buffers()))
    assert int(module.count) == int(module.norm.num_batches_tracked) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    plain = nn.BatchNorm2d(4)
    if dtype is torch.float64:
        plain.double()
    x = torch.randn(8, 4, 3, 3).to(dtype)
    params, buffers, apply = tp.functional(plain)
    y, _ = apply(params, buffers, x)
    assert y.dtype == dtype
    torch.testing.assert_close(y, copy.deepcopy(plain)(x).detach())


def test_errors():
    with pytest.raises(TypeError, match=r"^functional takes an nn.Module, but got a function\.$"):
        tp.functional(lambda x: x)
    params, buffers, apply = tp.functional(nn.BatchNorm1d(4))
    for given, x, mask, text in (
        (params, X, torch.ones(3, dtype=torch.bool),
         "batch_mask has shape [3], but a batch norm of the module got an input of shape [8, 4]. "
         "The mask must have one bool per row of dim 0; a module that folds other dims into dim 0 "
         "cannot use it."),
        (params, X[:1], None,
         "a batch norm that trains expects more than 1 value per channel, but got an input of "
         "shape [1, 4]. Give it more rows."),
        ({"weight": params["weight"]}, X, None,
         "params and buffers have no 'bias', which BatchNorm1d needs. Pass all that functional() "
         "returned."),
        ({**params, "module.bias": params["bias"]}, X, None,
         "BatchNorm1d has no parameter or buffer 'module.bias'. It has bias, num_batches_tracked, "
         "running_mean ..."),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^apply: {re.escape(text)}$"):
            apply(given, buffers, x, batch_mask=mask)


def test_tied_parameters_go_by_each_name():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    _, buffers, apply = tp.functional(module)
    y, _ = apply(module.state_dict(keep_vars=True), buffers, X)
    torch.testing.assert_close(y, module(X))


@pytest.mark.parametrize("length", [8, 7])
def test_mapped_instance_norms_see_the_whole_batch(length, mode):
    plain = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    params, buffers, apply = tp.functional(plain, axis_name="i")
    images = torch.randn(length, 4, 5)
    rows, mask = tp.shard_batch(images, stacked=True)

    def run(params, buffers, rows, mask):
        return apply(params, buffers, rows, batch_mask=mask)

    axes = {"in_axes": (None, None, 0, 0), "out_axes": (0, None)}
    y, new = tp.pmap(run, "i", **axes, compile=mode)(params, buffers, rows, mask)
    expected = plain(images).detach()
    torch.testing.assert_close(y.cpu().flatten(0, 1)[:length], expected)
    for name, value in plain.named_buffers():
        torch.testing.assert_close(new[name].cpu(), value)


def test_a_batch_of_one_real_row_leaves_the_statistics_as_they_are():
    params, buffers, apply = tp.functional(nn.BatchNorm1d(4))
    mask = torch.tensor([True, False])
    _, new = apply(params, buffers, X[:1].expand(2, 4), batch_mask=mask)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(new[name], buffers[name])
