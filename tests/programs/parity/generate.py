"""Ask the installed jax for the results of the stored programs.

    python tests/programs/parity/generate.py

A program in ``*_cases.json`` that has no result gets jax's; those of the others are compared. With
the jax that is named in the files nothing changes. A new program is a line with ``id``, ``family``,
``jax_expr`` and ``inputs``, and ``ideal_expr`` where jax raises or is wrong. The comparison is the
tests' own: so decoding and comparing are known to be right before torchpmap is judged by them.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# Read by jax when it is first used.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import functools

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from parity import values
from parity.cases import FILES

NAMES = {
    **{"jax": jax, "lax": jax.lax, "jnp": jnp, "np": np, "partial": functools.partial},
    **{"P": jax.sharding.PartitionSpec, "Mesh": jax.sharding.Mesh},
    "Auto": jax.sharding.AxisType.Auto,
}


def given(case: values.Case, field: str) -> tuple[Any, Exception | None]:
    """What jax gives, or raises, for a program; it can hang with several calls in flight."""
    inputs = {name: values.decode(value, _input) for name, value in case["inputs"].items()}
    try:
        with jax.enable_x64(case.get("x64", False)):
            return jax.block_until_ready(values.evaluate(case[field], NAMES | inputs)), None
    except Exception as error:
        return None, error


def _input(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(jnp.bfloat16) if dtype == "bfloat16" else array


def complete(case: values.Case) -> None:
    """Add the result of a program that has none."""
    field = "ideal_expr" if "ideal_expr" in case else "jax_expr"
    result, error = given(case, field)
    if error is None:
        case["ideal" if field == "ideal_expr" else "expected"] = values.encode(result)
    elif field == "ideal_expr":
        raise error
    else:
        first_line = str(error).partition("\n")[0][:120]
        case["expected_error"] = {"type": type(error).__name__, "message": first_line}
        print(f"LOOK AT {case['id']}: jax raised {case['expected_error']}")


def difference(case: values.Case) -> str:
    """Between what jax gives now and what is stored; nothing where that is not jax's own."""
    is_error = values.must_raise(case)
    if "ideal" in case:
        field, is_of_jax = "ideal_expr", "ideal_expr" in case
    else:
        field = "jax_expr"
        is_of_jax = "legacy_expected" not in case
        is_of_jax &= not is_error or "message" in case["expected_error"]
    if not is_of_jax:
        return ""
    result, error = given(case, field)
    try:
        if is_error:
            assert error is not None, "nothing raised"
            values.check_error(error, case)
        else:
            assert error is None, repr(error)
            values.check(result, values.expectation(case))
    except AssertionError as wrong:
        return str(wrong)
    return ""


def main() -> int:
    """How many results jax does not reproduce. New results are written before the others are
    compared, which takes ten minutes.
    """
    known = []
    for path in FILES:
        stored = json.loads(path.read_text())
        for case in stored["cases"]:
            if {"ideal", "legacy_expected", "expected", "expected_error"} & case.keys():
                known.append(case)
            else:
                complete(case)
                stored["jax"] = jax.__version__
        rows = ",\n".join(json.dumps(case) for case in stored.pop("cases"))
        path.write_text(f'{json.dumps(stored)[:-1]}, "cases": [\n{rows}\n]}}\n')
    differences = {case["id"]: text for case in known if (text := difference(case))}
    for name, text in differences.items():
        print(f"{name}: {text}")
    return len(differences)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
