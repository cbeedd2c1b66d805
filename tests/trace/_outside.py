"""Whether changes outside a function are noticed, and seen by its next call."""

import torch

from torchpmap._trace.environment import Environment

ONES = torch.ones(4)


def a_class(*bases, metaclass=type, **attributes):
    return metaclass("Class", bases, attributes)


def watched(fun):
    environment = Environment(fun)
    assert environment.changed()  # nothing is known yet
    environment.refresh()
    assert not environment.changed()
    return environment


def noticed(fun, change):
    """Whether a change is noticed once, and not again after a refresh."""
    environment = watched(fun)
    change()
    found = environment.changed()
    environment.refresh()
    assert not environment.changed()
    return found


def check_follows(f, change, expected):
    """Call, change the outside, call: the result is always that of the present."""
    assert f(ONES).flatten().tolist() == [1.0] * 4
    for value in expected:
        change(value)
        for _ in range(2):
            assert f(ONES).flatten().tolist() == [value] * 4
