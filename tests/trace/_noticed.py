"""Whether changes outside a function are noticed."""

from __future__ import annotations

from torchpmap._trace.environment import Environment


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
