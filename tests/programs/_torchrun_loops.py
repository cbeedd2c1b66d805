"""The stored programs with loops and branches in every rank of a job of 4 (see
test_torchrun_loops.py).

    torchrun --standalone --nproc-per-node=4 _torchrun_loops.py FOLDER MODE:ID...

Programs that map nothing run whole in a mapped function, for a row on each rank.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from _launched import Raised, run_cases
from _torchrun_parity import NUM_RANKS, gathered, local_pmap, spanning
from parity import lookalike, values
from parity.values import Case

import torchpmap as tp

MODES: dict[str, Any] = {"graph": {"backend": "eager"}, "uncompiled": False, "inductor": True}
OUTSIDE = ("gr_outside_pmap",)
"""Programs with a derivative around the mapped function."""

CASES: list[Case] = json.loads((Path(__file__).parent / "parity" / "loop_cases.json").read_text())[
    "cases"
]
BY_NAME = {f"{mode}:{case['id']}": (case, mode) for case in CASES for mode in MODES}


def is_mapped(case: Case) -> bool:
    return "pmap" in case["jax_expr"] or "shard_map" in case["jax_expr"]


def run(case: Case, mode: str) -> Any:
    inputs = {name: values.decode(value) for name, value in case["inputs"].items()}
    compiled = MODES[mode]
    shard_map = functools.partial(tp.shard_map, compile=compiled)
    pmap: Any = functools.partial(local_pmap, compile=compiled)
    if case["id"] in OUTSIDE:
        inputs = torch.utils._pytree.tree_map(spanning, inputs)
        pmap = lookalike.pmap_in_mode(compiled)

    def whole(given: Any) -> Any:
        return lookalike.run(case["jax_expr"], given, pmap, shard_map)

    try:
        if is_mapped(case):
            return gathered(whole(inputs))
        mapped = tp.pmap(whole, in_axes=None, out_axes=None, axis_size=NUM_RANKS, compile=compiled)
        return values.fetch(mapped(inputs))
    except Exception as error:
        return Raised(" ".join(kind.__name__ for kind in type(error).__mro__), str(error))


if __name__ == "__main__":
    run_cases({name: functools.partial(run, *BY_NAME[name]) for name in sys.argv[2:]}, sys.argv[1])
