"""Covers: _base/axis_spec.py. More of its messages are in transforms/test_messages.py."""

import dataclasses
import functools
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from _trees import Box, Point, State, registered, trees
from hypothesis import given
from hypothesis import strategies as st

from torchpmap._base.axis_spec import (
    IN_AXES_HINT,
    argument_names,
    broadcast_axes,
    canonical_axis,
    check_axis_spec,
    flatten,
    mapped_axis_size,
    type_text,
)


@pytest.fixture(scope="module", autouse=True)
def _nodes():
    with registered():
        yield


X = np.ones(3)

# Argument names -----------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def forward(self, x, y):
        return x


class Callable_:
    def __call__(self, a, b):
        return a

    def method(self, c, *more, d=1):
        return c


@pytest.mark.parametrize(
    ("fun", "num_args", "names"),
    [
        (lambda x, y: x, 2, ["x", "y"]),
        (lambda x, y=1: x, 1, ["x"]),
        (lambda x, *args: x, 3, ["x", "args[0]", "args[1]"]),
        (lambda *xs: xs, 2, ["xs[0]", "xs[1]"]),
        (lambda x, /, y, *, z: x, 2, ["x", "y"]),
        (lambda x: x, 2, ["x", "args[1]"]),
        (functools.partial(lambda x, y, z: x, 1), 2, ["y", "z"]),
        (Callable_(), 2, ["a", "b"]),
        (Callable_().method, 2, ["c", "more[0]"]),
        (Model(), 2, ["x", "y"]),
        (dict.fromkeys, 0, []),
        (min, 2, ["args[0]", "args[1]"]),
    ],
)
def test_argument_names(fun, num_args, names):
    assert argument_names(fun, num_args) == names


# Axis specifications ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [0, None, -1, (), (0, None), [{"a": None, "b": (1,)}, 2]])
def test_legal_axis_spec(spec):
    """Others: tests/transforms/test_messages.py."""
    check_axis_spec(spec, "pmap in_axes")
    with pytest.raises(TypeError, match=r"nested\) container .* The leaf False is a bool\.$"):
        check_axis_spec((spec, {"a": False}), "pmap in_axes")


@pytest.mark.parametrize(
    ("prefix", "tree", "axes"),
    [
        (({"a": 0},), (None,), [None]),
        (OrderedDict(b=1, a=0), OrderedDict(a=5, b=6), [0, 1]),
        (defaultdict(int, a=1), defaultdict(list, a=[5, 6]), [1, 1]),
        (State(0, 1), State([1, 2], 3), [0, 0, 1]),
        (State(None, 1), State([1, 2], 3), [None, None, 1]),
        (State(0, 1), State(None, 3), [1]),
        (Box(1, ["t"]), Box((1, 2), ["t"]), [1, 1]),
        (Box(1, [np.ones((2, 3)).T]), Box(2, [np.ones((2, 3)).T]), [1]),
    ],
)
def test_broadcast_axes(prefix, tree, axes):
    """Any prefix of any tree: ``test_every_prefix_broadcasts``."""
    assert broadcast_axes(prefix, tree, what="pmap in_axes") == axes


@pytest.mark.parametrize(
    ("prefix", "tree", "text"),
    [
        (State((0,), 1), State([1, 2], 3), r"different types at key path\n    pmap in_axes\.w\n"),
        (Box(1, ["t"]), Box((1, 2), ["u"]), "different pytree metadata at key path"),
        # The first difference in key order of the full tree, not of the specification.
        ({"b": [0], "a": 0}, {"a": X, "b": X}, r"pmap in_axes\['b'\]\n"),
    ],
)
def test_other_prefix_errors(prefix, tree, text):
    with pytest.raises(ValueError, match=text):
        broadcast_axes(prefix, tree, what="pmap in_axes")


ERRORS = [
    ([0, 0], (X, X),
     "types at key path\n    pmap in_axes[0]\nAt that key path, the prefix pytree pmap in_axes "
     "has a subtree of type\n    <class 'list'>\nbut at the same key path the full pytree has a "
     "subtree of different type\n    <class 'tuple'>."),
    (((0, 0, 0), 0), ((X, X), X),
     "lengths of tuple at key path\n    pmap in_axes[0][0]\nAt that key path, the prefix pytree "
     "pmap in_axes has a subtree of type tuple of length 3, but the full pytree has a subtree "
     "of the same type but of length 2."),
    (({"a": 0},), ({"a": X, "b": X},),
     "numbers of pytree children at key path\n    pmap in_axes[0][0]\nAt that key path, the "
     "prefix pytree pmap in_axes has a subtree of type\n    <class 'dict'>\nwith 1 child keys\n"
     "    a\nbut at the same key path the full pytree has a subtree of the same type but with 2 "
     "child keys\n    a b\nso the symmetric difference on key sets is\n    b"),
    (({"c": 0, "a": 0},), ({"a": X, "b": X},),
     "pytree metadata at key path\n    pmap in_axes[0][0]\nAt that key path, the prefix pytree "
     "pmap in_axes has a subtree of type\n    <class 'dict'>\nwith metadata\n    ('a', 'c')\n"
     "but at the same key path the full pytree has a subtree of the same type but with metadata"
     "\n    ('a', 'b')"),
    (({"a": {"b": (0,)}},), ({"a": {"b": X}},),
     "types at key path\n    pmap in_axes[0][0]['a']['b']\nAt that key path, the prefix pytree "
     "pmap in_axes has a subtree of type\n    <class 'tuple'>\nbut at the same key path the "
     "full pytree has a subtree of different type\n    <class 'numpy.ndarray'>."),
    (((0, 0),), (Point(X, X),),
     "types at key path\n    pmap in_axes[0][0]\nAt that key path, the prefix pytree pmap "
     "in_axes has a subtree of type\n    <class 'tuple'>\nbut at the same key path the full "
     f"pytree has a subtree of different type\n    {Point}."),
]  # fmt: skip


@pytest.mark.parametrize(("prefix", "tree", "text"), ERRORS)
def test_prefix_errors_have_the_text_of_jax(prefix, tree, text):
    with pytest.raises(ValueError) as info:  # noqa: PT011 (the whole text follows)
        broadcast_axes(prefix, tree, what="pmap in_axes", hint=IN_AXES_HINT, root="[0]")
    assert str(info.value) == f"pytree structure error: different {text}{IN_AXES_HINT}"


def prune(tree, draw):
    """A random prefix of a tree, and the axis that it gives to every leaf (None to a None)."""
    if draw(st.booleans()) or type(tree) not in (list, tuple, dict, Point):
        axis = draw(st.sampled_from([None, 0, 1, -1]))
        leaves = flatten(tree)[0]
        return axis, [None if leaf is None else axis for leaf in leaves]
    if type(tree) is dict:
        pruned = {key: prune(child, draw) for key, child in tree.items()}
        ordered = dict(reversed([(key, prefix) for key, (prefix, _) in pruned.items()]))
        by_key = flatten({key: _Frozen(axes) for key, (_, axes) in pruned.items()})[0]
        return ordered, [axis for frozen in by_key for axis in frozen.axes]
    pruned = [prune(child, draw) for child in tree]
    prefixes = [prefix for prefix, _ in pruned]
    made = Point(*prefixes) if type(tree) is Point else type(tree)(prefixes)
    return made, [axis for _, axes in pruned for axis in axes]


@dataclasses.dataclass
class _Frozen:
    axes: list


@given(trees, st.data())
def test_every_prefix_broadcasts(tree, data):
    prefix, axes = prune(tree, data.draw)
    assert broadcast_axes(prefix, tree, what="pmap in_axes") == axes


@given(trees, trees)
def test_any_pair_gives_one_axis_per_leaf_or_a_value_error(prefix, tree):
    try:
        axes = broadcast_axes(prefix, tree, what="pmap in_axes")
    except ValueError as e:
        text = str(e)
    else:
        text = None
        assert len(axes) == len(flatten(tree)[0])
    assert text is None or text.startswith("pytree structure error: different ")


# Axes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "ndim", "expected"),
    [
        *((0, 1, 0), (-1, 1, 0), (2, 3, 2), (-1, 3, 2), (-3, 3, 0)),
        (-4, 3, "-3 <= axis < 3."),
        (0, 0, "None, because there is no dimension."),
    ],
)
def test_canonical_axis(axis, ndim, expected):
    def result():
        return canonical_axis(axis, ndim, what="pmap out_axes", path="output['a']")

    if isinstance(expected, int):
        assert result() == expected
        return
    with pytest.raises(ValueError) as info:  # noqa: PT011 (the whole text follows)
        result()
    assert str(info.value) == (
        f"pmap out_axes: axis {axis} is out of bounds for array of dimension {ndim}, which is "
        f"output['a']; expected {expected}"
    )


def test_type_text():
    assert type_text("torch.float32", (4, 3)) == "float32[4,3]"
    assert type_text("int64", ()) == "int64[]"
    assert type_text(str(torch.bool), torch.ones(2).shape) == "bool[2]"


def leaves_of(**shapes):
    return [(path, shape, "torch.float32") for path, shape in shapes.items()]


@pytest.mark.parametrize(
    ("shapes", "axes", "axis_size", "size"),
    [
        ({"x": (4, 3), "y": (5, 4)}, [0, 1], None, 4),
        ({"x": (4, 3), "y": (5, 4)}, [0, -1], None, 4),
        ({"x": (4,), "y": (7,)}, [0, None], None, 4),
        ({"x": (4,), "y": None}, [0, 0], None, 4),
        ({"x": ()}, [None], None, None),
        ({"x": ()}, [None], 3, 3),
        ({"x": (3,)}, [0], 3, 3),
        ({"x": (0, 2)}, [0], None, 0),
        ({}, [], None, None),
    ],
)
def test_mapped_axis_size(shapes, axes, axis_size, size):
    assert mapped_axis_size(leaves_of(**shapes), axes, axis_size=axis_size) == size


VOTE = "got inconsistent sizes for array axes to be mapped:\n"


@pytest.mark.parametrize(
    ("leaves", "axes", "axis_size", "text"),
    [
        ([("x", (4, 3), "float32"), ("y['w']", (3, 5), "torch.bool"), ("z", (4,), "int64"),
         ("rest[0]", (1, 4), "int64")], [0, -1, 0, 1], None,
         f"pmap {VOTE}  * most axes (3 of them) had size 4, e.g. axis 0 of argument x of type "
         "float32[4,3];\n  * one axis had size 5: axis -1 of argument y['w'] of type bool[3,5]"),
        ([(n, (s,), "float32") for n, s in zip("abcdef", (5, 4, 4, 6, 6, 4), strict=True)],
         [0] * 6, 7,
         f"pmap {VOTE}  * the `axis_size` argument was 7;\n"
         "  * most axes (3 of them) had size 4, e.g. axis 0 of argument b of type float32[4];\n"
         "  * some axes (2 of them) had size 6, e.g. axis 0 of argument d of type float32[6];\n"
         "  * one axis had size 5: axis 0 of argument a of type float32[5]"),
        ([("x", (3, 4), "float32")], [-3], None,
         "pmap was requested to map its argument along axis -3, which implies that its rank "
         "should be at least 3, but is only 2 (its shape is (3, 4)) (argument x)"),
        ([("x", (3,), "float32"), ("y['b']", (), "int64")], [0, 0], None,
         "pmap was requested to map its argument along axis 0, which implies that its rank "
         "should be at least 1, but is only 0 (its shape is ()) (argument y['b'])"),
        ([("x", (3,), "float32")], [0], 4,
         "Specified axis_size 4 doesn't match received axis_size 3. "
         "(axis 0 of argument x of type float32[3])"),
    ],
)  # fmt: skip
def test_mapped_axis_size_errors(leaves, axes, axis_size, text):
    with pytest.raises(ValueError) as info:  # noqa: PT011 (the whole text follows)
        mapped_axis_size(leaves, axes, axis_size=axis_size)
    assert str(info.value) == text
