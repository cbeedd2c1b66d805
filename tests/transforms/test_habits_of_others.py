"""Covers: messages about names, dtypes and lists as users of torch, numpy or JAX write them."""

import re

import numpy as np
import pytest
import torch
from _support import EAGER

import torchpmap as tp

X = torch.arange(4.0)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: tp.psum(X, axis="i"),
            "psum() got an unexpected keyword argument 'axis': it is ax",
        ),
        (lambda: tp.pmap(lambda x: x, axis="i"), "'axis': it is axis_name here."),
        (lambda: tp.pmap(lambda x: x, static_argnums=1), "it is static_broadcasted_argnums here."),
        (lambda: tp.pmap(lambda x: x, axisname="i"), "it is axis_name here."),
        (lambda: tp.vmap(lambda x: x, in_dims=1), "it is in_axes here."),
        (
            lambda: tp.shard_map(lambda x: x, in_specs=None, out_specs=None, check_rep=False),
            "it is check_vma here.",
        ),
        (lambda: tp.pmap(lambda x: x, jit=True), "unexpected keyword argument 'jit'$"),
        (
            lambda: tp.random.normal(tp.random.key(0), (2,), "float32"),
            "got the string 'float32' for the dtype, expected torch.float32.",
        ),
        (lambda: tp.random.uniform(tp.random.key(0), (2,), np.float32), "expected torch.float32."),
        (lambda: tp.random.gumbel(tp.random.key(0), (2,), "float64"), "expected torch.float64."),
        (lambda: tp.random.randint(tp.random.key(0), (2,), 0, 3, "int32"), "expected torch.int32."),
        (lambda: tp.random.rademacher(tp.random.key(0), (2,), "int8"), "expected torch.int8."),
        (lambda: tp.random.bits(tp.random.key(0), (2,), "uint8"), "expected torch.uint8."),
        (
            lambda: tp.random.normal(tp.random.key(0), (2,), "bf16"),
            "got the string 'bf16' for the dtype, expected a torch.dtype (float32,",
        ),
        (
            lambda: tp.random.normal(tp.random.key(0), (2,), torch.int32),
            "got dtype torch.int32, expected float32",
        ),
    ],
)
def test_names_and_dtypes_as_others_write_them(call, told):
    with pytest.raises(TypeError, match=told if told.endswith("$") else re.escape(told)):
        call()


@pytest.mark.usefixtures("pool")
def test_a_keyword_that_the_function_refuses_is_its_own():
    f = tp.pmap(lambda x: (lambda axis_name: x)(axis=1), compile=EAGER)
    with pytest.raises(TypeError, match=r"argument 'axis'\nwhile tracing"):
        f(X)


def test_lists_of_numbers():
    told = (
        r"rank should be at least 1.*\(argument x\[0\]\[0\]\)\. It is the Python number at "
        r"x\[0\]\[0\]"
    )
    advice = r": lists and tuples are trees of their items, not arrays. Pass torch.tensor\(...\)"
    for mapped in (tp.pmap(lambda x: x, compile=EAGER), tp.vmap(lambda x: x)):
        with pytest.raises(ValueError, match=told + advice):
            mapped([[1.0, 2.0], [3.0, 4.0]])
        with pytest.raises(ValueError, match=r"\(argument x\)$"):
            mapped(1.0)
    blocks = tp.shard_map(
        lambda x: x, mesh=tp.make_mesh((2,), ("i",)), in_specs=tp.P("i"), out_specs=tp.P("i")
    )
    with pytest.raises(ValueError, match=r"of rank 0.*It is the Python number at x\[0\]" + advice):
        blocks([1, 2])
