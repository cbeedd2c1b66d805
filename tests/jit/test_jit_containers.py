"""Covers: _transforms/jit_containers.py: lists and dicts given to a step, which changes them."""

from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from _cases import Cases, data
from _support import EAGER

import torchpmap as tp

pytestmark = pytest.mark.usefixtures("pool")

CASES = Cases()


@CASES.add(2)  # without and with "mean"
def dicts(on):
    state, found = {"h": on.put(data()), "n": 1, "name": "a"}, []

    @on.jit
    def f(state, batch):
        x = batch.pop("x")
        state["h"] = state["h"] * 0.5 + x
        state["mean"], state["n"] = state["h"].mean(), 2
        return x.sum() + len(batch)

    for x in on.rows(3):
        batch = {"x": x, "id": 3}
        found += [f(state, batch), state["h"], state["mean"]]
        assert batch == {"id": 3}
    assert list(state) == ["h", "n", "name", "mean"]
    assert state["n"] == 2
    return found


@CASES.add(4)  # the list has 1 to 4 items
def lists_that_grow(on):
    cache, table = [on.put(data())], defaultdict(list)

    @on.jit
    def f(x, *, cache, table):
        cache.append(cache[-1] + x)
        table["all"].append(x.sum())

    for x in on.rows(4):
        f(x, cache=cache, table=table)
    return [*cache, *table["all"]]


@CASES.add(1)
def what_stays_is_the_same_object(on):
    w, part, mark = on.put(data()), [on.put(data(1))], object()
    state = OrderedDict(first=w, last=part, both=deque([w, mark, w]), pairs=[(w, 1), (w, 2)])

    @on.jit
    def f(state, x):
        state["first"], state["last"] = state["last"], state["first"]
        state["both"].rotate()
        state["pairs"][0] = (x * 2, 1)
        state.move_to_end("first")
        return {"state": state, "sum": x.sum()}

    x = on.put(data(2))
    found = f(state, x)
    assert found["state"] is state
    assert list(state) == ["last", "both", "pairs", "first"]
    assert (state["first"], state["last"]) == (part, w)
    assert state["first"] is part
    assert [one is other for one, other in zip(state["both"], (w, w, mark), strict=True)] == [
        True
    ] * 3
    assert state["pairs"][1] == (w, 2)
    return [found["sum"], state["pairs"][0][0]]


@CASES.add(2)  # a program that stores, too
def beside_what_is_stored(on):
    class Model:
        hidden = None

        def step(self, state, x):
            self.hidden = x * 2 if self.hidden is None else self.hidden + x
            state["h"] = self.hidden.sum()

    model, state, found = Model(), {}, []
    f = on.jit(model.step)
    for x in on.rows(3):
        f(state, x)
        found += [state.pop("h"), model.hidden]
    return found


@CASES.add(1)
def with_gradients_outside(on):
    w = on.put(data()).requires_grad_()

    @on.jit
    def f(found, x):
        found["y"] = (w * x).sin()

    for x in on.rows(2):
        found = {}
        f(found, x)
        found["y"].sum().backward()
    return [w.grad]


@CASES.add(1)
def under_a_transform(on):
    found = []

    @on.jit
    def f(x, given):
        given["y"] = x.sin()
        return given.pop("x").sum()

    def outer(x):
        given = {"x": x * 2}
        return f(x, given) + given["y"].sum()

    for x in on.rows(2):
        found.append(torch.func.grad(outer)(x))
    return found


@CASES.add(fullgraph=False)
def one_in_two_places(on):
    found, known = [], []

    @on.jit
    def dicts(first, second, x):
        first["y"] = x * 2
        return second.get("y", x)

    @on.jit
    def lists(first, second, x):
        first.append(x * 2)
        return second[-1] if second else x

    @on.jit
    def global_changed(given, x):
        known.append(x)
        return given[-1] if given else x * 2

    @on.jit
    def given_changed(given, x):
        given.append(x * 2)
        return known[-1]

    for x in on.rows(2):
        found += [dicts({}, {}, x), dicts(same := {}, same, x)]
        found += [lists([], [], x), lists(same := [], same, x)]
        found += [global_changed([], x), global_changed(known, x)]
        found += [given_changed([], x), given_changed(known, x)]
    return found


@CASES.add(fullgraph=False)
def new_objects(on):
    class Box:
        def __init__(self, x):
            self.x = x

    @on.jit
    def f(state, x):
        state["first"] = new = [x]
        state["last"] = new
        return x * 2

    @on.jit
    def returns(state, x):
        state["first"] = new = [x]
        return new

    @on.jit
    def hides(state, x):
        state["box"] = Box(x)
        return x * 3

    found = []
    for x in on.rows(2):
        found += [f(state := {}, x), *returns(other := {}, x), hides(boxes := {}, x)]
        state["first"].append(x)
        other["first"].append(x)
        found += [*state["last"], *other["first"], boxes["box"].x]
    return found


@CASES.add(fullgraph=False)
def sets(on):
    @on.jit
    def f(state, x):
        state["seen"].add(1)
        return x * 2

    found = []
    for x in on.rows(2):
        found += [f(state := {"seen": set()}, x)]
        assert state == {"seen": {1}}
    return found


test_as_in_plain_torch = CASES.tests()


@pytest.mark.parametrize("name", ["first", "number"])
def test_a_container_of_another_kind(name):
    class Pair:
        def __init__(self, first, second, number):
            self.first, self.second, self.number = first, second, number

    torch.utils._pytree.register_pytree_node(
        Pair, lambda x: ([x.first, x.second], x.number), lambda items, n: Pair(*items, n)
    )

    def f(pair):
        setattr(pair, name, pair.second * 2 if name == "first" else 2)

    pair = Pair(torch.ones(2), torch.ones(2), 1)
    with pytest.raises(tp.TraceError, match=r"it changes a Pair that it is given\. Use a dict"):
        tp.jit(f, compile=EAGER, fullgraph=True)(pair)
    with pytest.warns(UserWarning, match="it changes a Pair"):
        tp.jit(f, compile=EAGER)(pair)
    assert (pair.first.tolist(), pair.number) == (([2, 2], 1) if name == "first" else ([1, 1], 2))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state, new: state.update(a=new, b=new), "a new list or dict into two places"),
        (lambda state, new: state.update(a=Held(new)), "a Held with a tensor inside into a list"),
    ],
)
def test_what_a_call_could_not_make(change, reason):
    with pytest.raises(tp.TraceError, match=f"it puts {reason}"):
        tp.jit(lambda state, x: change(state, [x]), compile=EAGER, fullgraph=True)(
            {}, torch.ones(2)
        )


class Held:
    def __init__(self, x):
        self.x = x


def test_debug_nans_looks_at_what_is_left_in_a_dict(monkeypatch):
    def f(state):
        state["log"] = (state["x"] - 2).log()

    monkeypatch.setattr(tp.config, "debug_nans", True)
    with pytest.raises(FloatingPointError, match=r"log.* gave NaN"):
        tp.jit(f, compile=EAGER)({"x": torch.ones(2)})


def test_arrays_that_stay_are_the_same_objects():
    x, label = np.ones(4), np.ones(4)
    batch = {"x": x, "label": label}
    f = tp.jit(lambda batch: torch.as_tensor(batch.pop("label")).sum(), compile=EAGER)
    assert f(batch).item() == 4
    assert list(batch) == ["x"]
    assert batch["x"] is x


def test_what_a_node_holds_besides_its_children_changes_as_in_plain_torch():
    class Node:
        def __init__(self, x, kept):
            self.x, self.kept = x, kept

    torch.utils._pytree.register_pytree_node(
        Node, lambda x: ([x.x], x.kept), lambda children, kept: Node(*children, kept)
    )

    def f(given):
        given.kept["n"] += 1
        return Node(given.x * given.kept["n"], {"n": given.kept["n"]})

    kept = {"n": 5}
    with pytest.warns(UserWarning, match="it changes a Node"):
        found = [tp.jit(f, compile=EAGER)(Node(torch.ones(()), kept)) for _ in range(3)]
    assert [each.x.item() for each in found] == [6, 7, 8]
    assert kept == {"n": 8}
    mapped = tp.pmap(f, in_axes=None, axis_size=2, compile=EAGER)
    for _ in range(2):  # neither the caller's nor an earlier result's is that of the program
        result = mapped(Node(torch.ones(()), {"n": 5}))
        assert (result.x.tolist(), result.kept) == ([6, 6], {"n": 6})
        result.kept["n"] = 9


def test_a_node_whose_children_are_made_anew():
    class Box:
        def __init__(self, items):
            self.items = items

    torch.utils._pytree.register_pytree_node(
        Box, lambda x: ([dict(x.items)], None), lambda children, _: Box(*children)
    )
    f = tp.jit(lambda box: box.items["a"] * 2, compile=EAGER, fullgraph=True)
    assert f(Box({"a": torch.ones(2)})).tolist() == [2, 2]
