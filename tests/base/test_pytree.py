"""Covers: _base/pytree.py."""

import copy
import dataclasses
import gc
import itertools
import pickle
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple

import cloudpickle
import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from _trees import Box, Point, State, node, registered, trees
from hypothesis import given
from hypothesis import strategies as st

from torchpmap._base import pytree as _structure
from torchpmap._base.pytree import flatten, flatten_call

Other = namedtuple("Other", ["x", "y"])


class Live:
    def __init__(self, x):
        self.x = x


@pytest.fixture(scope="module", autouse=True)
def _nodes():
    with registered():
        yield


# Flatten ------------------------------------------------------------------------------------------

CASES = [
    (3, [3], ["t"]),
    (None, [None], ["t"]),
    ((), [], []),
    ({}, [], []),
    ([1, [2, (3,)]], [1, 2, 3], ["t[0]", "t[1][0]", "t[1][1][0]"]),
    ({"b": 1, "a": 2}, [2, 1], ["t['a']", "t['b']"]),
    ({10: "x", 9: "y", "k": "z"}, ["y", "x", "z"], ["t[9]", "t[10]", "t['k']"]),
    (OrderedDict(b=1, a=2), [1, 2], ["t['b']", "t['a']"]),
    (defaultdict(list, b=1, a=2), [2, 1], ["t['a']", "t['b']"]),
    (deque([1, 2], maxlen=3), [1, 2], ["t[0]", "t[1]"]),
    (Point(1, [2]), [1, 2], ["t.x", "t.y[0]"]),
    (State([1], 2), [1, 2], ["t.w[0]", "t.b"]),
    (State(None, 2), [2], ["t.b"]),
    (Box((1, 2), ["t"]), [1, 2], ["t[<flat index 0>][0]", "t[<flat index 0>][1]"]),
    (
        (1, {"b": (2, 3), "a": 4}),
        [1, 4, 2, 3],
        ["t[0]", "t[1]['a']", "t[1]['b'][0]", "t[1]['b'][1]"],
    ),
]


@pytest.mark.parametrize(("tree", "leaves", "paths"), CASES, ids=[str(c[2]) for c in CASES])
def test_flatten(tree, leaves, paths):
    got, structure = flatten(tree)
    assert got == leaves
    assert structure.num_leaves == len(leaves)
    assert structure.paths("t") == paths
    back = structure.unflatten(got)
    assert back == tree
    assert type(back) is type(tree)
    if isinstance(tree, dict):
        assert list(back) == list(tree)


def test_every_torch_node_agrees_with_torch():
    trees = [torch.ones(2, 2).max(0), torch.linalg.slogdet(torch.eye(2)), torch.Size([1, 2])]
    for tree in trees:
        ours, structure = flatten(tree)
        theirs, spec = pytree.tree_flatten(tree)
        assert len(ours) == len(theirs)
        assert all(a is b for a, b in zip(ours, theirs, strict=True))
        back = structure.unflatten(ours)
        assert type(back) is type(pytree.tree_unflatten(theirs, spec))
        assert all(a is b for a, b in zip(back, tree, strict=True))


def test_a_type_registered_after_it_was_a_leaf():
    late = Live(5)
    assert flatten([late, late])[0] == [late, late]
    with node(Live, lambda t: ([t.x], None), lambda c, _: Live(*c)):
        assert flatten([late, late])[0] == [5, 5]
    assert flatten([late, late])[0] == [late, late]


def test_a_node_may_give_its_children_as_an_iterator():
    with node(Live, lambda t: (iter(t.x), None), lambda c, _: Live(tuple(c))):
        leaves, structure = flatten(Live((1, [2])))
        assert leaves == [1, 2]
        assert structure.unflatten(leaves).x == (1, [2])
        assert flatten(Live((3, 4)))[0] == [3, 4]


def test_constants_are_structure():
    @dataclasses.dataclass(frozen=True)
    class Mode:
        name: str

    pytree.register_constant(Mode)
    try:
        leaves, structure = flatten((Mode("a"), 1))
        assert leaves == [1]
        assert structure.unflatten([2]) == (Mode("a"), 2)
        assert structure == flatten((Mode("a"), 5))[1]
        assert structure != flatten((Mode("b"), 1))[1]
    finally:
        pytree._deregister_pytree_node(Mode)


class MyList(list):
    pass


def test_subclasses_are_leaves():
    for leaf in (MyList([1]), torch.ones(2), np.ones(2), torch.nn.Parameter(torch.ones(1)), "text"):
        assert flatten((leaf,))[0][0] is leaf
    with pytest.raises(ValueError, match=r"Structure\(\(\*, \*\)\) takes 2 leaves, but got 3"):
        flatten((1, 2))[1].unflatten([1, 2, 3])


class Moody(Box):
    def __repr__(self):
        raise KeyError("not now")


TEXTS = [
    ((1, (2,), [3], {}), "(*, (*,), [*], {})"),
    ({"b": Point(1, [2]), 3: None}, "{'b': Point(x=*, y=[*]), 3: *}"),
    (OrderedDict(a=State(None, 1)), "OrderedDict({'a': State(b=*)})"),
    (deque([1], maxlen=2), "deque(*, 2)"),
    (Box((1, 2), ["t"]), "Box((*, *), ['t'])"),
    (Moody(1, [object()]), "Moody(*, list)"),
    (Moody(1, [Moody(2, [])]), "Moody(*, list)"),
]


def test_a_structure_shows_itself_alike_in_every_process():
    with node(
        Moody, lambda b: ([b.content], list(b.tags)), lambda c, tags: Moody(next(iter(c)), tags)
    ):
        for tree, text in TEXTS:
            assert repr(flatten(tree)[1]) == f"Structure({text})"


def test_a_structure_shows_what_it_holds_beside_named_fields():
    class Scaled:
        def __init__(self, x, factor):
            self.x, self.factor = x, factor

    pytree.register_pytree_node(
        Scaled,
        lambda each: ([each.x], each.factor),
        lambda xs, factor: Scaled(*xs, factor),
        flatten_with_keys_fn=lambda each: ([(pytree.GetAttrKey("x"), each.x)], each.factor),
        serialized_type_name="tests.Scaled",
    )
    try:
        assert repr(flatten(Scaled(1, 3))[1]) == "Structure(Scaled(x=*, 3))"
    finally:
        pytree._deregister_pytree_node(Scaled)


# Structure as a key -------------------------------------------------------------------------------


DIFFERENT = [
    *(3, (), [], {}, (1,), [1], [[1]], (1, 2), deque([1]), deque([1], maxlen=2)),
    *({"a": 1}, {"b": 1}, {1: 1}, {1.0: 1}, {True: 1}, {"a": (1,)}, {"a": 1, "b": 2}),
    *(OrderedDict(a=1), OrderedDict(a=1, b=2), OrderedDict(b=1, a=2)),
    *(defaultdict(list, a=1), defaultdict(int, a=1), Point(1, 2), Other(1, 2)),
]


def test_different_structures():
    structures = [flatten(tree)[1] for tree in DIFFERENT]
    assert len(set(structures)) == len(DIFFERENT)
    for a, b in itertools.combinations(structures, 2):
        assert a != b
    for tree, structure in zip(DIFFERENT, structures, strict=True):
        back = structure.unflatten(flatten(tree)[0])
        assert repr(back) == repr(tree)


def test_unsortable_and_unhashable_contexts():
    class Factory:
        __hash__ = None

        def __call__(self):
            return 0

    tree = defaultdict(Factory(), {"a": 1, 2: 3, (1, "x"): 4, frozenset("b"): 5})
    backwards = defaultdict(tree.default_factory, reversed(tree.items()))
    leaves, structure = flatten(tree)
    assert flatten(backwards) == (leaves, structure)
    assert structure.unflatten(leaves) == tree
    for context in (["t"], [np.ones(2)]):
        assert flatten(Box(1, context))[1] == flatten(Box(2, copy.deepcopy(context)))[1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Box(1, ["t"]), Box(1, ["u"])),
        (State(None, 1), State(1, None)),
        (Box(1, [np.ones(2)]), Box(1, [np.zeros(2)])),
        (Box(1, [np.ones(2)]), Box(1, [np.ones(2, "f")])),
        (Box(1, [1]), Box(1, [1.0])),
        (Box(1, [0.0]), Box(1, [-0.0])),
        (Box(1, [(1,)]), Box(1, [(True,)])),
        ({0.0: 1}, {-0.0: 1}),
        ({(1,): 1}, {(1.0,): 1}),
        (OrderedDict({(1,): 1}), OrderedDict({(True,): 1})),
    ],
)
def test_contexts_that_code_can_tell_apart(one, other):
    assert flatten(one)[1] != flatten(other)[1]


def test_a_context_that_has_changed_is_another_structure():
    tags = [1]
    with node(Live, lambda t: ([t.x], tags), lambda c, _: Live(*c)):
        before = flatten(Live(1))[1]
        tags.append(2)
        assert flatten(Live(1))[1] != before


@pytest.mark.parametrize(
    "kept",
    [{"n": [1]}, OrderedDict(n=[1]), [{1}], (["a"], np.ones(2)), Other(["a"], np.ones(2))],
)
def test_a_structure_keeps_its_context_as_it_was(kept):
    was = copy.deepcopy(kept)

    def change(context):
        inner = context["n"] if isinstance(context, dict) else context[0]
        inner.add(2) if isinstance(inner, set) else inner.append(2)
        if isinstance(context, tuple):
            context[1].fill(2)

    with node(Live, lambda t: ([t.x], kept), lambda c, context: (*c, context)):
        structure = flatten(Live(1))[1]
        change(kept)  # by the owner of the tree
        change(structure.unflatten([1])[1])  # by a function that was given a copy of it
        assert repr(structure.unflatten([1])) == repr((1, was))
        kept = copy.deepcopy(was)
        assert repr(flatten(Live(1))[1].unflatten([1])) == repr((1, was))


def test_a_context_that_contains_itself():
    kept = {"n": 1}
    kept["me"] = (kept,)
    with node(Live, lambda t: ([t.x], kept), lambda c, context: context):
        structure = flatten(Live(1))[1]
        kept["n"] = 2
        found = structure.unflatten([1])
        assert found["me"][0]["me"][0]["n"] == found["n"] == 1


def test_the_order_of_dict_keys_is_known_beside_the_structure():
    trees = [{"a": {}, "b": ()}, {"b": (), "a": {}}]
    trees += [({"b": {}, "a": {}}, {"a": {}, "b": {}}), ({"a": {}, "b": {}}, {"b": {}, "a": {}})]
    structures = [flatten(tree)[1] for tree in trees]
    assert structures[0] == structures[1]
    assert structures[2] == structures[3]
    orders = [structure.dict_order for structure in structures]
    assert orders[0] is None
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_structure_pickles(dumps):
    for tree in [*DIFFERENT, {"b": 1, "a": (None, 2)}]:
        leaves, structure = flatten(tree)
        copy = pickle.loads(dumps(structure))
        assert copy == structure
        assert hash(copy) == hash(structure)
        assert copy.unflatten(leaves) == tree


def test_tables_are_bounded():
    for i in range(2 * _structure._MAX_STRUCTURES):
        flatten({str(i): 1})
    assert len(_structure._structures) <= _structure._MAX_STRUCTURES
    for _ in range(2 * _structure._MAX_LEAF_TYPES):
        flatten(type("Leaf", (), {})())
    assert len(_structure._leaf_types) <= _structure._MAX_LEAF_TYPES


def test_no_leaf_is_kept_alive():
    class Leaf:
        pass

    leaf = Leaf()
    ref = weakref.ref(leaf)
    result = flatten({"a": [leaf]})
    del result, leaf
    gc.collect()
    assert ref() is None


@given(trees)
def test_round_trip(tree):
    leaves, structure = flatten(tree)
    back = structure.unflatten(leaves)
    assert repr(back) == repr(tree)
    assert len(structure.paths()) == len(leaves) == structure.num_leaves
    theirs = pytree.tree_leaves(tree)
    assert sorted(map(repr, leaves)) == sorted(map(repr, theirs))


def shuffled(tree, random):
    """The same tree with the keys of every dict in another order."""
    if type(tree) is dict or type(tree) is defaultdict:
        items = [(k, shuffled(v, random)) for k, v in tree.items()]
        random.shuffle(items)
        return dict(items) if type(tree) is dict else defaultdict(int, items)
    if type(tree) in (list, tuple, deque):
        return type(tree)(shuffled(child, random) for child in tree)
    return tree


@given(trees, st.randoms(use_true_random=False))
def test_dict_order_never_matters(tree, random):
    other = shuffled(tree, random)
    assert repr(flatten(other)) == repr(flatten(other))
    assert flatten(other) == flatten(tree)
    assert hash(flatten(other)[1]) == hash(flatten(tree)[1])
    assert flatten(other)[1].paths("t") == flatten(tree)[1].paths("t")
    assert repr(flatten(other)[1].unflatten(flatten(tree)[0])) == repr(other)


@given(trees, trees)
def test_equal_structure_means_equal_shape(a, b):
    same = flatten(a)[1] == flatten(b)[1]
    blank = [0] * flatten(a)[1].num_leaves
    if same:
        assert flatten(a)[1].unflatten(blank) == flatten(b)[1].unflatten(blank)
    assert same == (flatten(b)[1] == flatten(a)[1])


# Calls --------------------------------------------------------------------------------------------


def test_flatten_call():
    leaves, structure = flatten_call((1, {"w": 2}), {"z": 3, "y": [4]})
    assert leaves == [1, 2, 4, 3]
    assert structure.unflatten(leaves) == ((1, {"w": 2}), {"z": 3, "y": [4]})
    assert structure.call_paths(["x", "params"]) == ["x", "params['w']", "y[0]", "z"]
    assert structure == flatten_call((1, {"w": 2}), {"y": [4], "z": 3})[1]
