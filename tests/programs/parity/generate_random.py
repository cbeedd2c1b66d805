"""Write ``tests/random/random_cases.json``: what the installed jax draws for the programs below.

Run ``python tests/programs/parity/generate_random.py`` where jax is installed; with the jax named
in the file, it does not change.  A program is an expression that means the same in jax and in
torchpmap: the names are those of ``random``, the dtypes, ``array`` and ``vmap``.  Keys are written
as their two words, floats as their bits.
"""

import json
import os
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # read by jax when it is first used

import jax
import jax.numpy as jnp
import numpy as np

OUTPUT = Path(__file__).resolve().parents[2] / "random" / "random_cases.json"
SEEDS = (0, 1, 42, 2**31 - 1, 2**31, 2**32 - 1, -1, -123456789, 2**32, 2**40, 2**63 - 1, -(2**63))
SHAPES = ((), (1,), (7,), (2, 3), (3, 1, 5), (0,), (2, 0, 3))
FLOATS = ("float32", "float16", "bfloat16")
CONTINUOUS = ("normal", "exponential", "gumbel", "laplace", "logistic")


def keys() -> list[str]:
    return [
        *(f"key({seed})" for seed in SEEDS),
        "PRNGKey(7)",
        "key(array(-5, int32))",
        "key(array(4294967295, uint32))",
        "key(True)",
        "vmap(key)(array([0, 1, -1], int32))",
        *(f"split(key({seed}))" for seed in (0, 42, -1)),
        *(f"split(key(3), {num})" for num in (0, 1, 5, "()", "(2, 3)", "(2, 0)", "[4]")),
        "split(split(split(key(11), 3)[2])[1], 4)",
        "vmap(split)(split(key(0), 3))",
        "vmap(vmap(lambda k: split(k, 3)))(split(key(8), (2, 2)))",
        *(f"fold_in(key(5), {data})" for data in (0, 1, 2**31, 2**32 - 1, True)),
        "fold_in(key(5), array(-1, int32))",
        "fold_in(key(5), array(200, uint8))",
        "fold_in(fold_in(key(5), 3), 4)",
        "vmap(lambda i: fold_in(key(2), i))(array([0, 1, 2, 3], int32))",
        "vmap(fold_in)(split(key(2), 3), array([7, 8, 9], int32))",
        "vmap(lambda k: fold_in(k, 6))(split(key(2), 3))",
        "vmap(lambda i: bits(fold_in(key(21), i), (3,)))(array([0, 1, 2, 3], int32))",
        "vmap(lambda i: normal(fold_in(key(21), i), (3,)))(array([0, 1, 2, 3], int32))",
    ]


def bit_patterns() -> list[str]:
    return [
        *(f"bits(key({seed}), (5,))" for seed in SEEDS),
        *(f"bits(key(9), {shape})" for shape in SHAPES),
        *(f"bits(key(9), (6,), {dtype})" for dtype in ("uint8", "uint16", "uint32")),
        "vmap(lambda k: bits(k, (2, 2)))(split(key(1), 3))",
        "bits(key(3), (70000,))[69990:]",
    ]


def floats() -> list[str]:
    found = [f"uniform(key({seed}), (5,))" for seed in SEEDS]
    found += [f"uniform(key(4), {shape}, {dtype})" for shape in SHAPES for dtype in FLOATS]
    found += [
        f"uniform(key(6), (16,), {dtype}, {low}, {high})"
        for dtype in FLOATS
        for low, high in ((-3.7, 2.1), (0.1, 0.9), (-1e-3, 1e3), (2, 5), (1.0, 1.0), (3.0, -1.0))
    ]
    found += [
        "uniform(key(6), (2, 3), minval=array([0.3, 1.0, -2.0], float32))",
        "uniform(key(6), (2, 3), float32, -0.3, array([[0.7], [1e4]], float32))",
        "uniform(key(6), (3,), float32, array([0.1, 0.2, 0.3], float32), array(0.7, float32))",
        "uniform(key(6), (3,), minval=array([1, 2, 3], int32), maxval=7)",
        "vmap(uniform)(split(key(6), 4))",
        "vmap(lambda k, x: uniform(k, (3,), maxval=x))(split(key(6)), array([2, 3.3], float32))",
    ]
    for name in CONTINUOUS:
        found += [f"{name}(key({seed}), (5,))" for seed in (0, -1, 2**32 - 1)]
        found += [f"{name}(key(4), {shape})" for shape in SHAPES]
        found += [f"{name}(key(13), (64,), {dtype})" for dtype in FLOATS]
        found += [f"vmap(lambda k: {name}(k, (3,)))(split(key(6), 4))"]
    found += ["normal(key(20), (400,))"]
    found += [f"truncated_normal(key(1), -2.0, 2.0, {shape})" for shape in ((), (5,), (2, 3), (0,))]
    found += [f"truncated_normal(key(2), -1.0, 0.5, (32,), {dtype})" for dtype in FLOATS]
    found += [
        "truncated_normal(key(3), 1.0, 3.0, (64,))",
        "truncated_normal(key(3), array([-1.0, 0.0], float32), array([[0.5], [2.0]], float32))",
        "vmap(lambda k: truncated_normal(k, -1.0, 1.0, (3,)))(split(key(6), 4))",
    ]
    return found


def integers() -> list[str]:
    found = [f"randint(key({seed}), (5,), 0, 1000)" for seed in SEEDS]
    found += [f"randint(key(4), {shape}, -3, 4)" for shape in SHAPES]
    found += [
        f"randint(key(5), (16,), {low}, {high}, int32)"
        for low, high in (
            (0, 1),
            (0, 65536),
            (0, 65537),
            (0, 100000),
            (-(2**31), 2**31 - 1),
            (0, 2**31 - 1),
            (-2000000000, 2000000001),
        )
    ]
    found += [
        f"randint(key(5), (16,), {low}, {high}, {dtype})"
        for dtype, low, high in (
            ("uint8", 0, 256),
            ("uint8", -4, 10),
            ("int8", -128, 128),
            ("int8", -5, 300),
            ("int16", 0, 70000),
            ("int16", -9, 10),
        )
    ]
    found += [
        "randint(key(6), (2, 3), array([0, 5, 10], int32), array([[6], [20]], int32))",
        "randint(key(6), (3,), array([0, 5, 9], int32), array([0, 5, 3], int32))",
        "vmap(lambda k, n: randint(k, (3,), 0, n))(split(key(6), 2), array([7, 70], int32))",
        *(f"rademacher(key(4), {shape})" for shape in SHAPES),
        "rademacher(key(5), (9,), float32)",
        *(f"bernoulli(key(4), 0.5, {shape})" for shape in SHAPES),
        *(f"bernoulli(key(5), {p}, (64,))" for p in (0.0, 0.1, 0.9, 1.0)),
        "bernoulli(key(5))",
        "bernoulli(key(5), array([0.1, 0.5, 0.9], float32))",
        "bernoulli(key(5), array([0.1, 0.5, 0.9], float16), (4, 3))",
        "vmap(lambda k: bernoulli(k, 0.3, (8,)))(split(key(6), 3))",
    ]
    return found


def choices() -> list[str]:
    matrix = "array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], int32)"
    logits = "array([[0.5, -1.0, 2.0], [0.0, 0.0, 0.0]], float32)"
    p = "array([0.1, 0.0, 0.2, 0.7], float32)"
    return [
        *(f"permutation(key(3), {n})" for n in (0, 1, 2, 9, 2000)),
        *(f"permutation(key({seed}), 12)" for seed in SEEDS),
        f"permutation(key(3), {matrix})",
        f"permutation(key(3), {matrix}, 1)",
        f"permutation(key(3), {matrix}, -1, True)",
        f"permutation(key(3), {matrix}, 0, True)",
        "permutation(key(3), array([1.5, 2.5, 3.5, 4.5, 5.5], float32))",
        "vmap(lambda k: permutation(k, 6))(split(key(6), 3))",
        "vmap(lambda k: permutation(k, array([1, 2, 3, 4], int32)))(split(key(6), 3))",
        *(f"choice(key(3), 10, {shape})" for shape in SHAPES),
        *(f"choice(key(3), 10, {shape}, False)" for shape in ((), (3,), (2, 5), (0,))),
        f"choice(key(3), {matrix}, (5,))",
        f"choice(key(3), {matrix}, (2, 2), axis=1)",
        f"choice(key(3), {matrix}, (), axis=-1)",
        f"choice(key(3), {matrix}, (3,), False)",
        f"choice(key(3), 4, (40,), p={p})",
        f"choice(key(3), 4, (), p={p})",
        f"choice(key(3), 4, (3,), False, {p})",
        f"choice(key(3), {matrix}, (2,), False, {p})",
        "choice(key(3), 4, (30,), p=array([1, 2, 3, 4], int32))",
        "choice(key(3), array([1.0, 2.0, 3.0], float32), (2, 2))",
        "vmap(lambda k: choice(k, 10, (4,)))(split(key(6), 3))",
        "vmap(lambda k: choice(k, 10, (4,), False))(split(key(6), 3))",
        f"vmap(lambda k: choice(k, 4, (4,), p={p}))(split(key(6), 3))",
        f"vmap(lambda k: choice(k, 4, (2,), False, {p}))(split(key(6), 3))",
        f"categorical(key(3), {logits})",
        f"categorical(key(3), {logits}, 0)",
        f"categorical(key(3), {logits}, shape=(6, 2))",
        f"categorical(key(3), {logits}, axis=0, shape=(4, 3))",
        f"categorical(key(3), {logits}, shape=(3, 2), replace=False)",
        f"categorical(key(3), {logits}, axis=0, shape=(2, 3), replace=False)",
        "categorical(key(3), array([[0.5, -1.0, 2.0]], float32), shape=(3, 4))",
        f"vmap(lambda k: categorical(k, {logits}))(split(key(6), 3))",
        "vmap(categorical)(split(key(6), 3), array([[0.0, 1.0], [2.0, 1.0], [5.0, 5.0]], float32))",
    ]


def wide() -> list[str]:
    """Programs that need jax's 64-bit mode."""
    top = 2**63 - 1
    ranges = ((0, 10), (-5, 2**40), (0, top), (-top - 1, top), (-(2**62), 2**62 + 7), (0, 2**32))
    return [
        "bits(key(9), (6,), uint64)",
        *(f"uniform(key(4), {shape}, float64)" for shape in SHAPES),
        "uniform(key(6), (16,), float64, -3.7, 2.1)",
        "normal(key(13), (64,), float64)",
        "exponential(key(13), (16,), float64)",
        "bernoulli(key(5), array([0.1, 0.5, 0.9], float64))",
        *(f"randint(key(5), (12,), {low}, {high}, int64)" for low, high in ranges),
        "randint(key(5), (12,), 0, 2**31, int32)",
        "randint(key(5), (12,), -2**31, 2**31, int32)",
        "randint(key(5), (12,), -2**40, 5, int32)",
        "randint(key(5), (3,), 0, array([10, 2**33, 2**62], int64), int64)",
    ]


def namespace() -> dict[str, Any]:
    """What the programs may name."""
    names: dict[str, Any] = {
        name: getattr(jnp, name)
        for name in (
            *(["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]),
            *(["bfloat16", "float16", "float32", "float64"]),
        )
    }
    public = [*CONTINUOUS, "split", "fold_in", "bits", "uniform", "truncated_normal"]
    public += ["randint", "rademacher", "bernoulli", "permutation", "choice", "categorical"]
    names |= {name: getattr(jax.random, name) for name in public}
    # Raw keys, so that every result is an array of numbers.
    names |= {"key": jax.random.PRNGKey, "PRNGKey": jax.random.PRNGKey}
    return names | {"array": jnp.array, "vmap": jax.vmap}


def encode(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    name = array.dtype.name
    if name.startswith(("float", "bfloat")):
        array = array.view(f"uint{8 * array.dtype.itemsize}")
    return {"dtype": name, "shape": list(array.shape), "data": array.ravel().tolist()}


def generate() -> None:
    families = {
        "keys": keys(),
        "bits": bit_patterns(),
        "floats": floats(),
        "integers": integers(),
        "choices": choices(),
        "wide": wide(),
    }
    rows = []
    for family, programs in families.items():
        with jax.enable_x64(family == "wide"):
            for program in programs:
                result = encode(eval(program, namespace()))
                rows.append(json.dumps({"family": family, "program": program, **result}))
    OUTPUT.write_text(f'{{"jax": "{jax.__version__}", "cases": [\n' + ",\n".join(rows) + "\n]}\n")
    print(f"{len(rows)} cases written to {OUTPUT.name}")


if __name__ == "__main__":
    generate()
