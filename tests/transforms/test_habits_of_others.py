"""Covers: messages about names, dtypes and lists as users of torch, numpy or JAX write them.

Missing names of JAX answer with their row of docs/from_jax.md (_base/jax_names.py).
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from _support import EAGER

import torchpmap as tp
from torchpmap._base import jax_names

X = torch.arange(4.0)


KEY = tp.random.key(0)
HABITS = [
    (lambda: tp.psum(X, axis="i"), "psum() got an unexpected keyword argument 'axis': it is ax"),
    (lambda: tp.pmap(lambda x: x, axis="i"), "'axis': it is axis_name here."),
    (lambda: tp.pmap(lambda x: x, static_argnums=1), "it is static_broadcasted_argnums here."),
    (lambda: tp.pmap(lambda x: x, axisname="i"), "it is axis_name here."),
    (lambda: tp.vmap(lambda x: x, in_dims=1), "it is in_axes here."),
    (lambda: tp.shard_map(lambda x: x, in_specs=None, out_specs=None, check_rep=False),
     "it is check_vma here."),
    (lambda: tp.jit(lambda x: x, in_shardings=tp.P("x")),
     "'in_shardings': place the arguments with torchpmap.device_put."),
    (lambda: tp.jit(lambda x, n: x, static_argnums=1),
     "'static_argnums': leave it out, arguments that are no tensors are static."),
    (lambda: tp.jit(lambda x: x, donate_argnums=0),
     "'donate_argnums': leave it out, what a step writes in place is not held twice."),
    (lambda: tp.vmap(lambda x: x, spmd_axis_name="x"), "leave it out, it changes no value."),
    (lambda: tp.grad(lambda x: x, holomorphic=True), "grad(lambda z: f(z).real)(z).conj()."),
    (lambda: tp.value_and_grad(lambda x: x, allow_int=True), "leave them out of argnums."),
    (lambda: tp.random.key(0, impl="rbg"), "keys are those of threefry2x32."),
    (lambda: tp.pmap(lambda x: x, jit=True), "unexpected keyword argument 'jit'$"),
    (lambda: tp.random.normal(KEY, (2,), "float32"),
     "got the string 'float32' for the dtype, expected torch.float32."),
    (lambda: tp.random.uniform(KEY, (2,), np.float32), "expected torch.float32."),
    (lambda: tp.random.gumbel(KEY, (2,), "float64"), "expected torch.float64."),
    (lambda: tp.random.randint(KEY, (2,), 0, 3, "int32"), "expected torch.int32."),
    (lambda: tp.random.rademacher(KEY, (2,), "int8"), "expected torch.int8."),
    (lambda: tp.random.bits(KEY, (2,), "uint8"), "expected torch.uint8."),
    (lambda: tp.random.normal(KEY, (2,), "bf16"),
     "got the string 'bf16' for the dtype, expected a torch.dtype (float32,"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "told"), HABITS)
def test_names_and_dtypes_as_others_write_them(call, told):
    with pytest.raises(TypeError, match=told if told.endswith("$") else re.escape(told)):
        call()


@pytest.mark.usefixtures("pool")
def test_a_keyword_that_the_function_refuses_is_its_own():
    f = tp.pmap(lambda x: (lambda axis_name: x)(axis=1), compile=EAGER)
    with pytest.raises(TypeError, match=r"argument 'axis'\nwhile tracing"):
        f(X)


def test_lists_of_numbers():
    item = r"x\[0\]\[0\]"
    told = rf"rank should be at least 1.*\(argument {item}\)\. It is the Python number at {item}"
    advice = r": lists and tuples are trees of their items, not arrays. Pass torch.tensor\(...\)"
    for mapped in (tp.pmap(lambda x: x, compile=EAGER), tp.vmap(lambda x: x)):
        with pytest.raises(ValueError, match=told + advice):
            mapped([[1.0, 2.0], [3.0, 4.0]])
        with pytest.raises(ValueError, match=r"\(argument x\)$"):
            mapped(1.0)
    mesh, spec = tp.make_mesh((2,), ("i",)), tp.P("i")
    blocks = tp.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match=r"of rank 0.*It is the Python number at x\[0\]" + advice):
        blocks([1, 2])


# Names of JAX ------------------------------------------------------------------------------------

PAGE = (Path(tp.__file__).parent.parent / "docs" / "from_jax.md").read_text()


def names_in(cell):
    """The last parts of the names in a cell; not attributes, keywords and settings."""
    found = []
    for code in re.findall(r"`([^`]+)`", cell):
        name = re.match(r"([A-Za-z_][\w.]*)(?=$|\()", code)
        is_attribute = name and "." in name[1] and name[1][0].isupper()
        if name and not is_attribute and not name[1].startswith("jax_"):
            found.append(name[1].rpartition(".")[2])
    return found


def plain(cell):
    without_asides = re.sub(r" \(\[more\]\([^)]+\)\)", "", cell)
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", without_asides).replace("`", "").strip()


def rows_of_the_page():
    tables = PAGE.split("## Names\n")[1].split("\n## ")[0]
    found = {}
    for line in re.findall(r"^\| (`.*) \|$", tables, re.MULTILINE):
        there, here = line.split(" | ")
        for name in names_in(there):
            if name not in tp.__dir__():
                found.setdefault(name, plain(here))
    return found


def test_the_table_is_that_of_the_page():
    rows = [(name, instead) for names, instead in jax_names._ROWS.items() for name in names.split()]
    assert {k: v for k, v in rows if k not in tp.__dir__()} == rows_of_the_page()


@pytest.mark.parametrize(("name", "instead"), rows_of_the_page().items())
def test_a_missing_name_says_what_to_write(name, instead):
    with pytest.raises(AttributeError) as caught:
        getattr(tp, name)
    assert not hasattr(tp, name)
    instead = re.sub(r"\.? and the same name", f".{name}", instead)
    text = f"module 'torchpmap' has no attribute '{name}'. Instead of JAX's {name}: {instead} "
    assert str(caught.value).startswith(text + "(docs/from_jax")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("random", "gamma"),
        ("debug", "callback"),
        ("debug", "visualize_array_sharding"),
        ("profiler", "TraceAnnotation"),
        ("multihost", "sync_global_devices"),
        ("optim", "adam"),
    ],
)
def test_a_missing_name_of_a_module_says_what_to_write(module, name):
    instead = re.escape(rows_of_the_page()[name])
    with pytest.raises(AttributeError, match=f"^module 'torchpmap.{module}' .*: {instead} "):
        getattr(getattr(tp, module), name)


def test_other_names_have_no_advice_but_what_python_guesses():
    with pytest.raises(AttributeError) as caught:
        tp.psumm  # noqa: B018
    assert str(caught.value) == "module 'torchpmap' has no attribute 'psumm'"
    assert (caught.value.name, caught.value.obj) == ("psumm", tp)  # for "Did you mean: 'psum'?"
