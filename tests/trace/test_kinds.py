"""Covers: _trace/kinds.py: what cannot be on devices is refused; what can, arrives as it is."""

import decimal
import fractions

import numpy as np
import pytest
import torch
from _spies import asked
from _support import EAGER, check_rows
from torch._subclasses import FakeTensorMode
from torch.nn.parameter import UninitializedParameter

import torchpmap as tp

pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.filterwarnings("ignore:.*(prototype|beta|deprecated|with projections)"),
]


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def fake(*shape):
    with FakeTensorMode():
        return torch.ones(*shape)


EYE = torch.eye(4)
DENSE = r"only dense tensors can be put on devices\. (Pass|Return) \.to_dense\(\)"
TENSORS = {
    "coo": (lambda: EYE.to_sparse(), f"layout torch.sparse_coo, but {DENSE}"),
    "csr": (lambda: EYE.to_sparse_csr(), f"layout torch.sparse_csr, but {DENSE}"),
    "csc": (lambda: EYE.to_sparse_csc(), f"layout torch.sparse_csc, but {DENSE}"),
    "bsr": (lambda: EYE.to_sparse_bsr((2, 2)), f"layout torch.sparse_bsr, but {DENSE}"),
    "bsc": (lambda: EYE.to_sparse_bsc((2, 2)), f"layout torch.sparse_bsc, but {DENSE}"),
    "mkldnn": (lambda: EYE.to_mkldnn(), f"layout torch._mkldnn, but {DENSE}"),
    "quantized": (
        lambda: torch.quantize_per_tensor(EYE, 0.1, 0, torch.qint8),
        r"is quantized \(torch.qint8\).*\.dequantize\(\)"),
    "quantized per channel": (
        lambda: torch.quantize_per_channel(EYE, EYE[0] + 1, torch.zeros(4), 0, torch.quint8),
        r"is quantized \(torch.quint8\).*\.dequantize\(\)"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2)] * 4),
        r"is a nested tensor.*\.to_padded_tensor\(0\.0\).*\.unbind\(\)"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2)] * 4, layout=torch.jagged),
        r"is a nested tensor.*\.to_padded_tensor\(0\.0\).*\.unbind\(\)"),
    "wrapper": (lambda: Wrapper(EYE), r"is a test_kinds\.Wrapper.*the plain tensors"),
    "uninitialized": (
        lambda: UninitializedParameter(), r"is an uninitialized parameter.*Call its module"),
    "meta": (lambda: EYE.to("meta"), r"is on the meta device.*Pass a real tensor.*fun\.lower"),
    "fake": (lambda: fake(4, 4), r"is a fake tensor.*Pass a real one"),
}  # fmt: skip
NO_NUMBERS = ("meta", "fake")
OWN_ERRORS = ("wrapper", "uninitialized")
"""Kinds that raise as soon as torch's functions meet them."""


@pytest.mark.parametrize("name", TENSORS)
def test_arguments(name, monkeypatch):
    make, reason = TENSORS[name]
    f = tp.pmap(lambda x, y: x, in_axes=(0, None), compile=EAGER)
    f(torch.ones(4), {"w": EYE})  # the same shape and dtype
    sent = asked(monkeypatch)
    with pytest.raises(TypeError, match=r"argument y\['w'\] .*" + reason):
        f(torch.ones(4), {"w": make()})
    assert sent == []
    if name not in NO_NUMBERS:
        with tp.debug.fake_pmap(), pytest.raises(TypeError, match=r"argument y\['w'\] .*" + reason):
            f(torch.ones(4), {"w": make()})


@pytest.mark.parametrize("name", [name for name in TENSORS if name not in OWN_ERRORS])
def test_captured_tensors(name, monkeypatch):
    make, reason = TENSORS[name]
    captured = make()
    sent = asked(monkeypatch)
    with pytest.raises(
        ValueError, match=r"a tensor from outside the function .*" + reason
    ) as error:
        tp.pmap(lambda x: x + torch.sum(captured), compile=EAGER)(torch.ones(4))
    assert f"at {__file__}" in str(error.value)
    assert sent == []


RESULTS = {
    "coo": (torch.Tensor.to_sparse, rf".*\[1\].* {TENSORS['coo'][1]}"),
    "csr": (torch.Tensor.to_sparse_csr, rf".*\[1\].* {TENSORS['csr'][1]}"),
    "meta": (lambda x: torch.ones(3, device="meta"), r".*\[1\].* is on the meta device"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results(name, mode):
    fun, text = RESULTS[name]
    with pytest.raises(TypeError, match="the output of " + text):
        tp.pmap(lambda x: (x, fun(x)), compile=mode)(torch.ones(4, 4, 4))


def test_sparse_gradients_from_outside(mode):
    weight = torch.ones(10, 2, requires_grad=True)
    lookup = torch.nn.functional.embedding
    f = tp.pmap(lambda w, k: lookup(k, w, sparse=True), in_axes=(None, 0), compile=mode)
    result = f(weight, torch.zeros(4, 3, dtype=torch.long)).sum()
    with pytest.raises(
        NotImplementedError, match=r"gradient of type float32\[10, 2\].*sparse=True"
    ):
        result.backward()


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**40])
def test_numbers_that_no_dtype_holds(value):
    f = tp.pmap(lambda x, y: x, in_axes=(0, None), compile=EAGER)
    with pytest.raises(ValueError, match=r"argument y is -?\d+, which is too large for int64"):
        f(torch.ones(4), value)
    with pytest.raises(ValueError, match=r"the output of .* is -?\d+, which is too large"):
        tp.pmap(lambda x: value, compile=EAGER)(torch.ones(4))
    static = tp.pmap(lambda x, n: x + n % 7, static_broadcasted_argnums=1, compile=EAGER)
    assert static(torch.ones(4), value).tolist() == [1.0 + value % 7] * 4


@pytest.mark.parametrize(
    "value", [decimal.Decimal(1), fractions.Fraction(1, 2), "text", b"bytes", object(), {1}]
)
def test_other_values(value):
    with pytest.raises(TypeError, match="argument y has type"):
        tp.pmap(lambda x, y: x, in_axes=(0, None), compile=EAGER)(torch.ones(4), value)


NO_ARRAYS = [
    np.ones(4, object),
    np.array(["a"] * 4),
    np.array([b"a"] * 4),
    np.ones(4, "M8[s]"),
    np.ones(4, "m8[s]"),
    np.zeros(4, [("a", "i4")]),
    np.ones(4, np.longdouble),
    np.ones(4, np.clongdouble),
]


@pytest.mark.parametrize("array", NO_ARRAYS, ids=lambda array: str(array.dtype))
def test_arrays_that_torch_has_no_tensors_of(array):
    text = "is a numpy array of dtype .*, which torch has no tensors of"
    with pytest.raises(TypeError, match="argument x " + text):
        tp.pmap(lambda x: x, compile=EAGER)(array)
    with pytest.raises(TypeError, match="the output of .* " + text):
        tp.pmap(lambda x: array, compile=EAGER)(torch.ones(4))


def test_static_tensors():
    f = tp.pmap(lambda x, y: x, static_broadcasted_argnums=1, compile=EAGER)
    for value in (EYE, (1, EYE)):
        with pytest.raises(ValueError, match=r"Static argument \(index 1\).* has a tensor in it"):
            f(torch.ones(4), value)


COLLECTIVES = {
    "psum": tp.psum,
    "pmean": tp.pmean,
    "pmax": tp.pmax,
    "pmin": tp.pmin,
    "pbroadcast": lambda x, name: tp.pbroadcast(x, name, 0),
    "all_gather": tp.all_gather,
    "psum_scatter": tp.psum_scatter,
    "all_to_all": lambda x, name: tp.all_to_all(x, name, 0, 0),
    "ppermute": lambda x, name: tp.ppermute(x, name, [(0, 1)]),
    "axis_index": lambda x, name: tp.axis_index(name),
    "axis_size": lambda x, name: tp.axis_size(name),
}


@pytest.mark.parametrize("name", [None, {}, {"i"}, EYE, (None, "i")], ids=repr)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_names_that_are_none(collective, name):
    f = tp.pmap(lambda x: COLLECTIVES[collective](x, name), "i", compile=EAGER)
    with pytest.raises(TypeError, match=f"^{collective}: axis_name must be the name of an axis"):
        f(torch.ones(4, 4))


LAYERS = {
    "GRU": lambda: torch.nn.GRU(3, 5, 2),
    "both ways": lambda: torch.nn.GRU(3, 5, bidirectional=True, batch_first=True),
    "LSTM": lambda: torch.nn.LSTM(3, 5, 2),
    "projection": lambda: torch.nn.LSTM(3, 5, proj_size=2),
    "RNN": lambda: torch.nn.RNN(3, 5),
    "relu": lambda: torch.nn.RNN(3, 5, nonlinearity="relu", bias=False),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.long("GRU", "projection")
def test_recurrent_layers_with_more_rows_than_devices(name, mode):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    x = torch.randn(8, 4, 2, 3)
    result = tp.pmap(lambda a: layer(a)[0], compile=mode)(x)
    expected = torch.stack([layer(a)[0] for a in x])
    torch.testing.assert_close(result.cpu(), expected)
    weights = list(layer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(result.square().sum(), weights),
        torch.autograd.grad(expected.square().sum(), weights),
    )


def test_a_cell_with_more_rows_than_devices():
    cell = torch.nn.LSTMCell(3, 5)
    check_rows(lambda a: cell(a)[1].detach(), torch.randn(4, 2, 3))


def test_fullgraph_says_why_not():
    f = tp.pmap(lambda x: x * 2, compile=EAGER)
    x = torch.ones(4)
    compiled = torch.compile(lambda x: f(x) + 1, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"between the graphs.*fullgraph=True"):
        compiled(x)


@pytest.mark.parametrize("make", [lambda f: tp.pmap(f, compile=EAGER), tp.jit], ids=["pmap", "jit"])
def test_keyword_arguments_of_any_name_under_torch_compile(make):
    f = make(lambda x, *, call, mapped, jitted: x * call + mapped - jitted)
    x = torch.arange(4.0)
    compiled = torch.compile(lambda x: f(x, call=x, mapped=x, jitted=x).to_host(), backend="eager")
    torch.testing.assert_close(compiled(x), x * x)
