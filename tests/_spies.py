"""See what the running pool is asked to do."""

from typing import Any

import pytest
from _support import EAGER

import torchpmap as tp
from torchpmap._runtime import current

_METHODS = ("put", "define", "execute", "run_task", "fetch", "block")


def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """A list that grows by ``(method, last argument)`` whenever the pool is used."""
    runtime = current.runtime()
    calls: list[tuple[str, Any]] = []
    for name in _METHODS:
        monkeypatch.setattr(runtime, name, _noting(calls, name, getattr(runtime, name)))
    return calls


def _noting(calls: list[tuple[str, Any]], name: str, method: Any) -> Any:
    def noting(*args: Any) -> Any:
        calls.append((name, args[-1]))
        return method(*args)

    return noting


class Traces:
    """Counts how often a function body ran; has no attributes that ``Environment`` would watch."""

    __slots__ = ("n",)

    def __init__(self):
        self.n = 0

    def note(self):
        self.n += 1


def counted(f, **options):
    """``f`` mapped uncompiled, and the number of its traces."""
    traces = Traces()

    def g(*args, **kwargs):
        traces.note()
        return f(*args, **kwargs)

    return tp.pmap(g, compile=EAGER, **options), traces
