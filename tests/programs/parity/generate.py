"""Write ``more_cases.json``: the results that the installed jax gives for ``programs.py``.

Run ``python tests/programs/parity/generate.py`` where jax is installed; with the jax named in the
file, it does not change. ``--check FILE`` instead evaluates the programs stored in FILE with jax
and judges them with the tests' own comparison, which shows that the decoding and the comparison are
right before torchpmap is judged by them.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

# Read by jax when it is first used.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from parity import values
from parity.programs import FAMILIES, Program

OUTPUT = Path(__file__).with_name("more_cases.json")


def evaluate(expr: str, inputs: dict[str, Any]) -> Any:
    """The value of ``expr``, waited for: jax can hang on a CPU with several calls in flight."""
    names = {"jax": jax, "lax": jax.lax, "jnp": jnp, "np": np}
    return jax.block_until_ready(eval(expr, names | inputs))


def case_of(family: str, program: Program) -> values.Case:
    inputs = program["inputs"]
    case: values.Case = {
        "id": f"{family}_{program['id']}",
        "family": family,
        "jax_expr": program["expr"],
        "inputs": {name: values.encode(value) for name, value in inputs.items()},
    }
    if program["ideal"] is not None:
        case["ideal"] = values.encode(evaluate(program["ideal"], inputs))
        return case
    if not program["crashes"]:
        try:
            case["expected"] = values.encode(evaluate(program["expr"], inputs))
        except Exception as error:
            first_line = str(error).partition("\n")[0][:120]
            case["expected_error"] = {"type": type(error).__name__, "message": first_line}
    if program["error"] is not None:
        case.pop("expected", None)
        case["expected_error"] = {"type": program["error"]}
    if ("expected_error" in case) != (family == "errors"):
        print(f"LOOK AT {case['id']}: jax gave {case.get('expected_error', 'a value')}")
    return case


def generate() -> None:
    cases = [case_of(family, program) for family in FAMILIES for program in FAMILIES[family]]
    rows = ",\n".join(json.dumps(case) for case in cases)
    OUTPUT.write_text(f'{{"jax": "{jax.__version__}", "cases": [\n{rows}\n]}}\n')
    print(f"{len(cases)} cases written to {OUTPUT.name}")


def check(path: Path) -> int:
    """How many results jax does not reproduce, of those that are its own."""
    wrong = 0
    for case in json.loads(path.read_text())["cases"]:
        ours = "message" not in case.get("expected_error", {"message": ""})
        if ours or {"ideal", "legacy_expected"} & case.keys():
            continue
        inputs = {name: values.decode(value, _jax_input) for name, value in case["inputs"].items()}
        try:
            result, error = evaluate(case["jax_expr"], inputs), None
        except Exception as raised:
            result, error = None, raised
        try:
            if values.must_raise(case):
                assert error is not None, "nothing raised"
                assert isinstance(error, values.acceptable_errors(case)), repr(error)
            else:
                assert error is None, repr(error)
                values.check(result, values.expectation(case))
        except AssertionError as difference:
            wrong += 1
            print(f"{case['id']}: {difference}")
    return wrong


def _jax_input(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(jnp.bfloat16) if dtype == "bfloat16" else array


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.check is None:
        generate()
    else:
        sys.exit(min(check(arguments.check), 1))
