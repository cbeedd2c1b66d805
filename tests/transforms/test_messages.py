"""Covers: the texts of misuse, line by line, and that misuse is found before anything is sent."""

import numpy as np
import pytest
import torch
from _spies import asked
from _support import EAGER

import torchpmap as tp
from torchpmap._runtime import current

pytestmark = pytest.mark.cpu_only("the texts name CPU devices")

ones = torch.ones
HINT = """

The 'full pytree' here is the tuple of arguments passed positionally to the pmapped function, and \
the value of `in_axes` must be a tree prefix of that tuple. But it was not a prefix.

Check that the value of the `in_axes` argument to `pmap` is a tree prefix of the tuple of \
arguments passed positionally to the pmapped function."""
KEYWORDS = """

When some arguments are passed by keyword to the pmapped function, they are not included in the \
comparison to `in_axes`. Instead, each argument passed by keyword is mapped over its leading \
axis."""
OUTPUTS = """

The full pytree is the output of the pmapped function. Ensure that the `out_axes` argument to \
`pmap` is a pytree prefix of the pmapped function's output."""
DATA = (
    ", but a mapped function takes tensors, numpy arrays, numbers and None (in any pytree). Make "
    "it static (static_broadcasted_argnums or static_broadcasted_argnames), or close over it; a "
    "torch.nn.Module is passed as dict(module.named_parameters()) with torch.func.functional_call."
)
AXIS_NAME = (
    "pmap: axis_name must be a string or another hashable object that is not an int, tuple or list "
    "(ints mean positional dims and tuples several axes in the collectives), but got "
)


def f(x, y=None):
    return x


def generator(x):
    yield x


async def coroutine(x):
    return x


def axes(what, got, more=""):
    return (
        f"pmap {what} must be an int, None, or (nested) container with those types as leaves, "
        f"but got {got}.{more}"
    )


# What is found when the function is wrapped ------------------------------------------------------

WRAPPING = [
    (TypeError, lambda: tp.pmap(3),
     "Expected a callable value, got 3 of type int: fun of pmap must be a function."),
    (TypeError, lambda: tp.pmap(generator),
     f"Expected a function, got a generator function: {generator!r}"),
    (TypeError, lambda: tp.pmap(coroutine),
     f"Expected a function, got a coroutine function: {coroutine!r}. pmap calls are "
     "asynchronous by themselves."),
    (TypeError, lambda: tp.pmap(f, 3), f"{AXIS_NAME}3."),
    (TypeError, lambda: tp.pmap(axis_name=True), f"{AXIS_NAME}True."),
    (TypeError, lambda: tp.pmap(f, ("a", "b")), f"{AXIS_NAME}('a', 'b')."),
    (TypeError, lambda: tp.pmap(f, ["a"]), f"{AXIS_NAME}['a']."),
    (TypeError, lambda: tp.pmap(f, {}), f"{AXIS_NAME}{{}}."),
    (TypeError, lambda: tp.pmap(f, in_axes=np.int64(1)), axes("in_axes", "1")),
    (TypeError, lambda: tp.pmap(f, in_axes=(0, ["b"])),
     axes("in_axes", "(0, ['b'])", " The leaf 'b' is a str.")),
    (TypeError, lambda: tp.pmap(f, in_axes={"x": 1.5}), axes("in_axes", "1.5")),
    (TypeError, lambda: tp.pmap(f, out_axes={"a": 1.5}),
     axes("out_axes", "{'a': 1.5}", " The leaf 1.5 is a float.")),
    (ValueError, lambda: tp.pmap(f, in_axes=[0, 0]),
     "pytree structure error: different types at key path\n    pmap in_axes\n"
     "At that key path, the prefix pytree pmap in_axes has a subtree of type\n    <class 'list'>\n"
     "but at the same key path the full pytree has a subtree of different type\n"
     "    <class 'tuple'>." + HINT),
    (ValueError, lambda: tp.pmap(f, devices=[]),
     "'devices' argument to pmap must be non-empty, or None."),
    (TypeError, lambda: tp.pmap(f, devices=3),
     "'devices' argument to pmap must be a sequence of torchpmap devices, but got 3."),
    (TypeError, lambda: tp.pmap(f, devices=[0, 1]),
     "'devices' argument to pmap must hold torchpmap devices (torchpmap.devices()), but got 0."),
    (ValueError, lambda: tp.pmap(f, devices=[tp.Device(1, "cpu")] * 2),
     "'devices' argument to pmap must not repeat a device, but got "
     "[Device(cpu:1), Device(cpu:1)]."),
    (TypeError, lambda: tp.pmap(f, static_broadcasted_argnums=1.0),
     "pmap: static_broadcasted_argnums must be int or an iterable of int, but got 1.0."),
    (TypeError, lambda: tp.pmap(f, static_broadcasted_argnames=1),
     "pmap: static_broadcasted_argnames must be str or an iterable of str, but got 1."),
    (TypeError, lambda: tp.pmap(f, donate_argnums=(True,)),
     "pmap: donate_argnums must be int or an iterable of int, but got (True,)."),
    (ValueError, lambda: tp.pmap(f, static_broadcasted_argnums=0, donate_argnums=(1, 0)),
     "pmap: static_broadcasted_argnums [0] and donate_argnums [1, 0] cannot intersect."),
    (ValueError, lambda: tp.pmap(f, static_broadcasted_argnames="y", donate_argnames=("y",)),
     "pmap: static_broadcasted_argnums ['y'] and donate_argnums ['y'] cannot intersect."),
    (ValueError, lambda: tp.pmap(f, axis_size=0),
     "pmap: axis_size must be a positive int, but got 0."),
    (ValueError, lambda: tp.pmap(f, axis_size=True),
     "pmap: axis_size must be a positive int, but got True."),
    (ValueError, lambda: tp.pmap(f, randomness="none"),
     "pmap: randomness must be 'different', 'same' or 'error', but got 'none'."),
    (TypeError, lambda: tp.pmap(f, compile="inductor"),
     "compile must be True, False or a dict with the keys backend, mode, options (as "
     "torch.compile's arguments), but got 'inductor'."),
    (ValueError, lambda: tp.pmap(f, compile={"fast": True}),
     "compile got the unknown key 'fast'; known keys are backend, mode, options."),
    (TypeError, lambda: tp.pmap(f, compile={"backend": 3}),
     "compile: backend must be a name or a callable, but got 3."),
    (ValueError, lambda: tp.pmap(f, compile={"mode": "default", "options": {"max_fusion_size": 1}}),
     "compile: give either mode or options, not both (as in torch.compile)."),
    (ValueError, lambda: tp.pmap(f, compile={"mode": "fast"}),
     "compile got mode='fast'; known modes are default, reduce-overhead, max-autotune, "
     "max-autotune-no-cudagraphs."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "wrap", "text"), WRAPPING, ids=[text.partition(":")[0] for _, _, text in WRAPPING]
)
def test_misuse_when_wrapping(kind, wrap, text, monkeypatch):
    monkeypatch.setattr(current, "_start", lambda wanted: pytest.fail("a pool was started"))
    with pytest.raises(kind) as error:
        wrap()
    assert type(error.value) is kind
    assert str(error.value) == text


def test_unknown_backend_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown backend 'nope'; registered backends are .*eager"
    ):
        tp.pmap(f, compile={"backend": "nope"})


# What is found when the function is called -------------------------------------------------------


def structure(kind, path, rest, what="in_axes", hint=HINT):
    return (
        f"pytree structure error: different {kind} at key path\n    pmap {what}{path}\n"
        f"At that key path, the prefix pytree pmap {what} has a subtree of type{rest}{hint}"
    )


CALLING = {
    "in_axes of another length": (ValueError, lambda: tp.pmap(f, in_axes=(0,))(ones(4), ones(4)),
        structure("lengths of tuple", "",
        " tuple of length 1, but the full pytree has a subtree of the same type but of length 2.")),
    "in_axes for a keyword": (ValueError, lambda: tp.pmap(f, in_axes=(0, 0))(ones(4), y=ones(4)),
        structure("lengths of tuple", "[0]",
        " tuple of length 2, but the full pytree has a subtree of the same type but of length 1.",
        hint=HINT + KEYWORDS)),
    "in_axes with an unknown name": (ValueError,
        lambda: tp.pmap(f, in_axes={"z": 0})(ones(4), y=ones(4)),
        "pmap(f, in_axes={'z': 0})(<inputs>): in_axes names 'z', but the arguments of this call "
        "are x, y."),
    "sizes 4 and 3": (ValueError,
        lambda: tp.pmap(f, in_axes=(0, 1))(ones(4).int(), np.ones((2, 3))),
        "pmap got inconsistent sizes for array axes to be mapped:\n"
        "  * one axis had size 4: axis 0 of argument x of type int32[4];\n"
        "  * one axis had size 3: axis 1 of argument y of type float64[2,3]"),
    "too few dims": (ValueError, lambda: tp.pmap(f, in_axes=2)(ones(3, 4)),
        "pmap was requested to map its argument along axis 2, which implies that its rank should "
        "be at least 3, but is only 2 (its shape is (3, 4)) (argument x)"),
    "nothing mapped": (ValueError, lambda: tp.pmap(f, "i", in_axes=None)(ones(4)),
        "pmap(f, in_axes=None, axis_name='i')(<inputs>): pmap requires at least one argument with "
        "a mapped axis. Map an argument (in_axes), or give axis_size or devices."),
    "no arguments": (ValueError, lambda: tp.pmap(lambda: 0)(),
        "pmap(<lambda>, in_axes=0)(<inputs>): pmap requires at least one argument with "
        "a mapped axis. Map an argument (in_axes), or give axis_size or devices."),
    "size 0": (ValueError, lambda: tp.pmap(f)(ones(0, 4)),
        "pmap(f, in_axes=0)(<inputs>): the mapped axis has size 0, but it needs at least one "
        "row."),
    "fewer devices than rows": (ValueError, lambda: tp.pmap(f, devices=tp.devices()[:2])(ones(4)),
        "pmap(f, in_axes=0)(<inputs>): Leading axis size of input to pmapped function must equal "
        "the number of local devices passed to pmap. Got axis_size=4, num_local_devices=2 "
        "(devices=[Device(cpu:0), Device(cpu:1)])."),
    "devices that are not there": (ValueError,
        lambda: tp.pmap(f, devices=[tp.Device(0, "cpu"), tp.Device(7, "cpu")])(ones(2)),
        "Device(cpu:7) is not in use; the devices in use are cpu:0 to cpu:3. Choose from "
        "torchpmap.devices(), or call torchpmap.init() first."),
    "a backend that is not there": (RuntimeError, lambda: tp.pmap(f, backend="cuda")(ones(2)),
        "Unknown backend: 'cuda' requested, but the devices in use are of type 'cpu'. Call "
        "torchpmap.init(device_type='cuda') first."),
    "a backend with JAX's name": (RuntimeError, lambda: tp.devices("gpu"),
        "Unknown backend: 'gpu' requested, but the devices in use are of type 'cpu'. Call "
        "torchpmap.init(device_type='cuda') first."),
    "a backend of no kind": (RuntimeError, lambda: tp.devices("tpu"),
        "Unknown backend: 'tpu' requested, but the devices in use are of type 'cpu'. There are "
        "devices of the kinds 'cpu', 'cuda', 'xpu'."),
    "a missing static": (ValueError,
        lambda: tp.pmap(f, static_broadcasted_argnums=(1,))(ones(4), y=3),
        "pmapped function has static_broadcasted_argnums=(1,) but was called with only 1 "
        "positional argument. All static broadcasted arguments must be passed positionally (or be "
        "named in static_broadcasted_argnames)."),
    "an unhashable static": (ValueError,
        lambda: tp.pmap(f, static_broadcasted_argnums=1)(ones(4), [1]),
        "Non-hashable static arguments are not supported, as this can lead to unexpected "
        "cache-misses. Static argument (index 1) of type <class 'list'> for function f is "
        "non-hashable."),
    "an unhashable static name": (ValueError,
        lambda: tp.pmap(f, static_broadcasted_argnames="y")(ones(4), y=np.ones(1)),
        "Non-hashable static arguments are not supported, as this can lead to unexpected "
        "cache-misses. Static argument (name 'y') of type <class 'numpy.ndarray'> for function f "
        "is non-hashable."),
    "a string": (TypeError, lambda: tp.pmap(f)(ones(4), {"a": ["s"]}),
        f"pmap(f, in_axes=0)(<inputs>): argument y['a'][0] has type str{DATA}"),
    "a module": (TypeError, lambda: tp.pmap(f, in_axes=(None, 0))(torch.nn.Linear(1, 1), ones(4)),
        f"pmap(f, in_axes=(None, 0))(<inputs>): argument x has type Linear{DATA}"),
    "an array of objects": (TypeError, lambda: tp.pmap(f)(np.array([None] * 4)),
        "pmap(f, in_axes=0)(<inputs>): argument x is a numpy array of dtype object, which torch "
        "has no tensors of."),
    "a sparse tensor": (TypeError, lambda: tp.pmap(f)(torch.eye(4).to_sparse()),
        "pmap(f, in_axes=0)(<inputs>): argument x has the layout torch.sparse_coo, but only dense "
        "tensors can be put on devices. Pass .to_dense(), or its parts."),
    "out_axes of another length": (ValueError,
        lambda: tp.pmap(lambda x: (x, x), out_axes=(0,), compile=EAGER)(ones(4)),
        structure("lengths of tuple", "",
        " tuple of length 1, but the full pytree has a subtree of the same type but of length 2.",
        what="out_axes", hint=OUTPUTS)),
    "out_axes out of range": (ValueError,
        lambda: tp.pmap(lambda x: {"a": x}, out_axes=3, compile=EAGER)(ones(4, 2)),
        "pmap out_axes: axis 3 is out of bounds for array of dimension 2, which is the output of "
        "<lambda>['a']; expected -2 <= axis < 2."),
    "an output that is a string": (TypeError,
        lambda: tp.pmap(lambda x: (x, {"a": "s"}), compile=EAGER)(ones(4)),
        "the output of <lambda>[1]['a'] has type str, but a mapped function must return tensors, "
        "numpy arrays, numbers or None (in any pytree)."),
    "an output that is a generator": (TypeError,
        lambda: tp.pmap(lambda x: (y for y in [x]), compile=EAGER)(ones(4)),
        "the output of <lambda> has type generator, but a mapped function must return tensors, "
        "numpy arrays, numbers or None (in any pytree)."),
    "an unbound axis": (NameError,
        lambda: tp.pmap(lambda x: tp.psum(x, "j"), "i", compile=EAGER)(ones(4)),
        "unbound axis name: j. Bound here: 'i' (size 4). Name the axis where the function is "
        "mapped: pmap(f, axis_name='j') or vmap(f, axis_name='j')."),
    "no axis at all": (NameError, lambda: tp.psum(ones(4), "i"),
        "unbound axis name: i. Bound here: nothing. Name the axis where the function is mapped: "
        "pmap(f, axis_name='i') or vmap(f, axis_name='i')."),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLING)
def test_misuse_when_calling(pool, case, monkeypatch):
    kind, call, text = CALLING[case]
    calls = asked(monkeypatch)
    with pytest.raises(kind) as error:
        call()
    assert type(error.value) is kind
    assert str(error.value) == text
    assert calls == []
