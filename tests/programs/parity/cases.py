"""The stored programs, and how one is run on torchpmap in each of its modes."""

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

import torchpmap as tp
from parity import lookalike, values

FILES = sorted(Path(__file__).parent.glob("*_cases.json"))
LOOPS, PMAPS, PORTED, SHARD_MAPS = (json.loads(path.read_text())["cases"] for path in FILES)

COMPILE: dict[str, Any] = {"graph": {"backend": "eager"}, "uncompiled": False}
"""``compile=`` in each mode, if it is not the default."""
IN_PROCESS = ("inline", "serial")
"""All rows at once in this process, and one row after the other."""


def is_mapped(case):
    return "pmap" in case["jax_expr"] or "shard_map" in case["jax_expr"]


def run(case, mode, inputs, pmap=tp.pmap, axis_size=1, fetch=values.fetch):
    """What a program gives, fetched: what goes wrong on a worker must show here.

    A loop that maps nothing runs whole in a mapped function, unless the mode is ``plain``.
    """
    options = {"compile": COMPILE.get(mode, True)}
    pmap = functools.partial(pmap, **options)
    shard_map = functools.partial(tp.shard_map, **options)

    # what is stored ran on CPUs
    program = case["jax_expr"].replace("backend='cpu'", f"backend={tp.default_backend()!r}")

    def whole(given):
        return lookalike.run(program, given, pmap, shard_map)

    fake = tp.debug.fake_pmap(serial=mode == "serial")
    with fake if mode in IN_PROCESS else contextlib.nullcontext():
        if is_mapped(case) or case not in LOOPS or mode == "plain":
            return fetch(whole(inputs))
        mapped = tp.pmap(whole, in_axes=None, out_axes=None, axis_size=axis_size, **options)
        return values.fetch(mapped(inputs))
