"""Covers: calls under a default device, which is that of the caller's own tensors only."""

import pytest
import torch
from _support import EAGER

import torchpmap as tp

X = torch.arange(4.0)


@pytest.fixture
def on_meta(pool):
    """A default device whose tensors have no values: any that is used raises."""
    with torch.device("meta"):
        yield


def gradient(compile):
    x = X.clone().requires_grad_()
    tp.pmap(lambda x: (x + 1) ** 2 / 2, compile=compile)(x).sum().backward()
    return x.grad


def row_by_row():
    with tp.debug.fake_pmap(serial=True):
        return tp.pmap(lambda x: x + 1)(X.clone().requires_grad_())


CALLS = {
    "compiled": lambda: tp.pmap(lambda x: x + torch.ones(()), compile=EAGER)(X),
    "uncompiled": lambda: tp.pmap(lambda x: x + torch.ones(()), compile=False)(X),
    "operation": lambda: tp.device_put(X) + 1,
    "write": lambda: tp.device_put(X).add_(1),
    "number": lambda: tp.device_put(X, tp.devices()[0]).add(1.0),
    "gradient": lambda: gradient(EAGER),
    "uncompiled gradient": lambda: gradient(False),
    "row by row": row_by_row,
    "gathered": lambda: tp.multihost.all_gather(X + 1)[0],
    "broadcast": lambda: tp.multihost.broadcast({"x": X + 1})["x"],
}


@pytest.mark.parametrize("name", CALLS)
def test_values(name, on_meta):
    result = CALLS[name]()
    assert result.cpu().device.type == "cpu"
    assert result.tolist() == [1, 2, 3, 4]


def test_without_a_derivative(on_meta):
    """What cannot be differentiated still runs, and says so in ``backward()``."""
    x = X.clone().requires_grad_()
    y = tp.pmap(lambda x: x * x if float(x) >= 0 else x, compile=False)(x)
    assert y.tolist() == [0, 1, 4, 9]
    with pytest.raises(NotImplementedError):
        y.sum().backward()


def test_checkpoint(on_meta, tmp_path):
    tree = {"x": tp.device_put(X), "n": torch.empty(0, device="cpu")}
    tp.checkpoint.save(tmp_path / "step", tree)
    loaded = tp.checkpoint.load(tmp_path / "step", like=tree)
    assert loaded["x"].tolist() == X.tolist()
    assert tp.checkpoint.load(tmp_path / "step")["x"].tolist() == X.tolist()


def test_lowering(on_meta):
    assert tp.pmap(lambda x: x * 2).lower(X).cost().flops == 0
