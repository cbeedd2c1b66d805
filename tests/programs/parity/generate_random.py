"""Write ``tests/random/random_cases.json`` anew: what the installed jax draws for its programs.

Run ``python tests/programs/parity/generate_random.py`` where jax is installed; with the jax named
in the file, it does not change.  A program is an expression that means the same in jax and in
torchpmap: the names are those of ``random``, the dtypes, ``array`` and ``vmap``.  A new one is a
line with ``family`` and ``program``; those of the family ``wide`` need jax's 64-bit mode.  Keys are
written as their two words, floats as their bits.
"""

import json
import os
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # read by jax when it is first used

import jax
import jax.numpy as jnp
import numpy as np

FILE = Path(__file__).resolve().parents[2] / "random" / "random_cases.json"
DTYPES = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("bfloat16", "float16", "float32", "float64"),
)
DRAWS = (
    *("normal", "exponential", "gumbel", "laplace", "logistic", "split", "fold_in", "bits"),
    *("uniform", "truncated_normal", "randint", "rademacher", "bernoulli"),
    *("permutation", "choice", "categorical"),
)
NAMES = {
    **{name: getattr(jnp, name) for name in (*DTYPES, "array")},
    **{name: getattr(jax.random, name) for name in DRAWS},
    # Raw keys, so that every result is an array of numbers.
    **dict.fromkeys(("key", "PRNGKey"), jax.random.PRNGKey),
    "vmap": jax.vmap,
}


def drawn(family: str, program: str) -> dict[str, Any]:
    with jax.enable_x64(family == "wide"):
        array = np.asarray(eval(program, dict(NAMES)))
    name = array.dtype.name
    if name.startswith(("float", "bfloat")):
        array = array.view(f"uint{8 * array.dtype.itemsize}")
    return {"dtype": name, "shape": list(array.shape), "data": array.ravel().tolist()}


if __name__ == "__main__":
    named = [(c["family"], c["program"]) for c in json.loads(FILE.read_text())["cases"]]
    rows = [json.dumps({"family": f, "program": p, **drawn(f, p)}) for f, p in named]
    FILE.write_text(f'{{"jax": "{jax.__version__}", "cases": [\n' + ",\n".join(rows) + "\n]}\n")
    print(f"{len(rows)} cases written to {FILE.name}")
