"""Covers: _trace/environment.py: what changes while a function is traced."""

import types

import pytest
import torch
from _outside import a_class, watched
from _support import in_another_thread

from torchpmap._trace.environment import Environment

SHARED, COUNT = 1, 0
SETTINGS = {"rate": 1}
CONFIG = types.SimpleNamespace(rate=1, count=0)
MODULE = torch.nn.Dropout(0.5)
Meta = a_class(type, rate=1)
Made = a_class(metaclass=Meta)


@pytest.mark.parametrize(
    ("fun", "change"),
    [
        (lambda: SHARED, lambda: globals().update(SHARED=SHARED + 1)),
        (lambda: SETTINGS["rate"], lambda: SETTINGS.update(rate=SETTINGS["rate"] + 1)),
        (lambda: CONFIG.rate, lambda: setattr(CONFIG, "rate", CONFIG.rate + 1)),
        (lambda: MODULE(1), lambda: MODULE.train(not MODULE.training)),
        (lambda: Made.rate, lambda: setattr(Made, "rate", Meta.rate + 1)),
    ],
    ids=["global", "item", "attribute", "module", "class"],
)
def test_what_another_thread_changes_during_a_trace_is_a_change(fun, change):
    environment = Environment(fun)
    meanwhile, end = in_another_thread(change)
    try:
        with environment.tracing():
            meanwhile()
        assert environment.changed()
    finally:
        end()
    with environment.tracing():
        pass
    assert not environment.changed()


def test_what_changes_before_places_are_left_out_is_a_change():
    environment = watched(lambda: (SHARED, SETTINGS["rate"]))
    stored = {(id(SETTINGS), "rate")}
    SETTINGS["rate"] += 1
    assert environment.changed()
    environment.refresh()
    assert not environment.without(stored).changed()
    globals()["SHARED"] += 1
    assert environment.without(stored).changed()


def test_what_the_function_changes_during_its_trace_is_no_change():
    def counts():
        global COUNT
        COUNT += 1
        CONFIG.count += 1
        SETTINGS["count"] = COUNT
        return SHARED, CONFIG.rate

    environment = Environment(counts)
    meanwhile, end = in_another_thread(lambda: None)
    try:
        for _ in range(2):
            with environment.tracing():
                meanwhile()
                counts()
            assert not environment.changed()
    finally:
        end()
    with environment.tracing():
        counts()
        globals()["SHARED"] += 1
    assert environment.changed()


def test_what_changes_in_every_trace_is_told_once():
    environment = Environment(lambda: SHARED)
    for number in range(2):
        with environment.tracing():
            globals()["SHARED"] += 1
        assert environment.changed(), number
    told = r"\('SHARED'\) has changed in each of its last 3 traces"
    with pytest.warns(UserWarning, match=told), environment.tracing():
        globals()["SHARED"] += 1
    assert not environment.changed()
    with environment.tracing():
        globals()["SHARED"] += 1
    assert not environment.changed()


def test_a_trace_that_fails_leaves_what_was_noted():
    environment = Environment(lambda: SHARED)

    def fails():
        globals()["SHARED"] += 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), environment.tracing():
        fails()
    assert environment.changed()
