"""Covers: _trace/escaped.py: a tensor that outlives its mapped function is named by every use."""

import contextlib
import copy
import pickle

import numpy as np
import pytest
import torch
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")


class Keeps(torch.nn.Module):
    def forward(self, a):
        self.kept = torch.sin(a)
        return a + 1


LEAKS = {
    "argument": lambda kept, a: (kept.append(a), a + 1)[1],
    "result": lambda kept, a: (kept.append(torch.sin(a)), kept[-1])[1],
    "collective": lambda kept, a: (kept.append(tp.psum(a, "i")), a)[1],
    "inside grad": lambda kept, a: tp.grad(lambda b: (kept.append(b * 2), (b * b).sum())[1])(a),
    "inside vmap": lambda kept, a: tp.vmap(lambda b: (kept.append(b * 2), b)[1])(a),
    "before a failure": lambda kept, a: (kept.append(a * 2), {}["no such"])[1],
}
ROWS = pytest.mark.parametrize("rows", [4, 8], ids=["a row per device", "two rows per device"])


def leaked(how, rows, **options):
    kept = []
    with contextlib.suppress(LookupError):
        tp.pmap(lambda a: LEAKS[how](kept, a), "i", **options)(torch.ones(rows, 3))
    return kept[0]


def mapped(use, **options):
    return tp.pmap(use, **{"compile": EAGER, **options})


ONES = torch.ones(3)
USES = {
    "+": lambda t: t + 1,
    "+ from the right": lambda t: ONES + t,
    "in place": lambda t: t.add_(1),
    "a function": lambda t: torch.stack([t, t]),
    "index": lambda t: t[0],
    "comparison": lambda t: t == 1,
    "bool": bool,
    "item": lambda t: t.item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "asarray": np.asarray,
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "sharded": lambda t: tp.replicate(ONES) + t,
    "device_put": tp.device_put,
    "replicate": tp.replicate,
    "grad": lambda t: tp.grad(lambda a: a.sum())(t),
    "captured": lambda t: mapped(lambda a: a + t)(torch.ones(4, 3)),
    "captured by Python": lambda t: mapped(lambda a: a + t, compile=False)(torch.ones(4, 3)),
}


@ROWS
@pytest.mark.parametrize("how", LEAKS)
def test_every_use_is_refused(how, rows):
    tensor = leaked(how, rows, compile=EAGER)
    for name, use in USES.items():
        with pytest.raises(tp.TensorEscaped, match=r"escaped from the mapped function") as error:
            use(tensor)
        assert __file__ in str(error.value), name
        assert "Return it from the mapped function" in str(error.value)


@ROWS
@pytest.mark.parametrize("how", ["argument", "result", "inside grad"])
def test_as_an_argument_it_has_its_name(how, rows, mode):
    tensor = leaked(how, rows, compile=EAGER)
    fun = mapped(lambda x, y: x, in_axes=(0, None), compile=mode)
    for _ in range(2):
        with pytest.raises(tp.TensorEscaped, match=r"argument y\['a'\] \(of type float32\[3\]\)"):
            fun(torch.ones(4), {"a": tensor})
    with pytest.raises(tp.TensorEscaped, match=r"static argument \(index 1\)"):
        mapped(lambda x, y: x, static_broadcasted_argnums=1)(torch.ones(4), tensor)


def test_the_line_that_made_it_is_named():
    kept = []

    def fun(a):
        kept.append(a.cos())
        return a

    line = fun.__code__.co_firstlineno + 1
    mapped(fun)(torch.ones(4))
    with pytest.raises(tp.TensorEscaped) as error:
        kept[0] + 1
    assert str(error.value) == (
        f"this tensor (of type float32[]) escaped from the mapped function fun: made at "
        f"{__file__}:{line} `kept.append(a.cos())`. There it stood for values on the devices, and "
        "the call is over. Return it from the mapped function, and use the result."
    )


@ROWS
def test_printing_it_tells_and_does_not_raise(rows):
    tensor = leaked("result", rows, compile=EAGER)
    for text in (repr(tensor), str(tensor), f"{tensor}", str([tensor])):
        assert "escaped from the mapped function" in text
    assert (tensor.shape, tensor.dtype) == ((3,), torch.float32)


@ROWS
def test_kept_by_a_module(rows):
    module = Keeps()
    f = mapped(module)
    f(torch.ones(rows, 3))
    f(torch.ones(rows, 3))
    with pytest.raises(tp.TensorEscaped, match="function Keeps"):
        module.kept + 1
    with tp.debug.fake_pmap():  # in lanes of this process
        tensor = leaked("result", rows)
        with pytest.raises(tp.TensorEscaped, match="escaped from the mapped function"):
            tensor + 1


def test_what_was_there_before_stays_usable():
    """... also if the function is under transforms of the caller, or gives it back as it is."""
    w = torch.ones(3)

    def f(w):
        return mapped(lambda a: (w.contiguous() * a).sum())(torch.ones(4)).sum() + w.sum()

    assert tp.grad(f)(w).tolist() == [5.0] * 3
    kept = []
    mapped(lambda a: (kept.append(w.contiguous()), a)[1])(torch.ones(4))
    assert (kept[0] + 1).tolist() == [2.0] * 3


@pytest.mark.parametrize("transform", [tp.grad, torch.func.grad])
def test_argument_of_a_call_inside_that_was_there_before(transform):
    """... and that a transform of the caller's traces, whose level is counted anew inside."""

    def f(w):
        inner = tp.pmap(lambda a, b: a * b.sum(), "i", in_axes=(0, None), compile=EAGER)
        return tp.pmap(lambda a: inner(a, w), compile=EAGER)(w).sum()

    w = torch.arange(4.0).reshape(2, 2)
    assert transform(f)(w).tolist() == [[12.0, 12.0]] * 2
