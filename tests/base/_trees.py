"""Trees and node types that several test files use."""

import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from contextlib import contextmanager

import torch.utils._pytree as pytree
from hypothesis import strategies as st

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class State:
    w: object
    b: object


class Box:
    """Registered without key paths, with a list as context."""

    def __init__(self, content, tags):
        self.content, self.tags = content, tags

    def __eq__(self, other):
        return type(other) is Box and (self.content, self.tags) == (other.content, other.tags)


@contextmanager
def node(cls, flatten, unflatten) -> Iterator[None]:
    """Make a class a pytree node."""
    name = f"tests.{cls.__name__}"
    pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=name)
    try:
        yield
    finally:
        pytree._deregister_pytree_node(cls)


@contextmanager
def registered() -> Iterator[None]:
    """Make ``State`` and ``Box`` pytree nodes."""
    pytree.register_dataclass(State, serialized_type_name="tests.State")
    try:
        with node(
            Box, lambda b: ([b.content], list(b.tags)), lambda c, tags: Box(next(iter(c)), tags)
        ):
            yield
    finally:
        pytree._deregister_pytree_node(State)


keys = st.one_of(st.text(max_size=2), st.integers(0, 12), st.booleans())
trees = st.recursive(
    st.one_of(st.integers(), st.none(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(int, d)),
        st.builds(Point, inner, inner),
        st.lists(inner, max_size=3).map(deque),
    ),
    max_leaves=12,
)
