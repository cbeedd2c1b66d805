"""Stored programs and values: how they are evaluated, decoded into inputs, and compared.

A program is JAX source text over its inputs, ``jax_expr``: perhaps statements, then an expression.
``expected`` is what jax gave for it, ``expected_error`` what it raised (``builtin``: as an instance
of what; ``keywords``: what the message must name). Where that is an accident, ``ideal`` is right,
the value of ``ideal_expr`` in jax; ``legacy_expected`` is of jax 0.7.2, whose pmap could more.
``outside``: a transform is around a mapped function. ``x64``: jax ran in its 64-bit mode.

A stored value is a tree of one-key dictionaries::

    {"array": {"dtype": "float32", "shape": [2], "data": [1.0, "nan"]}}
    {"py": "float", "value": 3.5}                                  a Python scalar, passed as it is
    {"dict": {name: value}} {"tuple": [...]} {"list": [...]} null  the structure around them

In ``data``, nan and inf are strings and a complex number is {"re", "im"}. Nothing here needs jax or
torchpmap, so the same functions judge both.
"""

import ast
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Case = dict[str, Any]

# (rtol, atol) by result dtype; everything else must be equal.
TOLERANCES = {
    "float16": (2e-3, 1e-3),
    "bfloat16": (1.6e-2, 1e-2),
    "float32": (1e-5, 1e-6),
    "float64": (1e-10, 1e-12),
    "complex64": (1e-5, 1e-6),
    "complex128": (1e-10, 1e-12),
}
WIDER = {"int32": "int64", "float32": "float64", "complex64": "complex128"}


def to_torch(array: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(getattr(torch, dtype))


def to_numpy(array: np.ndarray, dtype: str) -> np.ndarray | torch.Tensor:
    # numpy has no bfloat16 of its own.
    return to_torch(array, dtype) if dtype == "bfloat16" else array


def decode(value: Any, make: Callable[[np.ndarray, str], Any] = to_torch) -> Any:
    """The tree that ``value`` describes, each array built by ``make(numpy array, dtype name)``."""
    if value is None:
        return None
    if "array" in value:
        return make(_array(value["array"]), value["array"]["dtype"])
    if "py" in value:
        return value["value"]
    if "dict" in value:
        return {name: decode(item, make) for name, item in value["dict"].items()}
    if "tuple" in value:
        return tuple(decode(item, make) for item in value["tuple"])
    return [decode(item, make) for item in value["list"]]


def encode(tree: Any) -> Any:
    """The inverse of ``decode``, for numpy arrays, tensors and jax arrays."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {"dict": {name: encode(item) for name, item in tree.items()}}
    if isinstance(tree, tuple | list):
        return {"tuple" if isinstance(tree, tuple) else "list": [encode(item) for item in tree]}
    if isinstance(tree, bool | int | float):
        return {"py": type(tree).__name__, "value": tree}
    array, dtype = _leaf(tree)
    stored = {"dtype": dtype, "shape": list(array.shape), "data": _plain(array.tolist())}
    if getattr(tree, "weak_type", False):
        stored["weak"] = True
    return {"array": stored}


def evaluate(program: str | ast.Module, names: dict[str, Any]) -> Any:
    """Run the statements of a program; the value of the expression behind them."""
    tree = ast.parse(program.strip()) if isinstance(program, str) else program
    *before, last = tree.body
    assert isinstance(last, ast.Expr)
    names = dict(names)
    exec(compile(ast.Module(before, []), "<stored program>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<stored program>", "eval"), names)


def fetch(tree: Any) -> Any:
    """``tree`` with every tensor a plain one of this process."""
    if isinstance(tree, dict):
        return {name: fetch(item) for name, item in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(fetch(item) for item in tree)
    return tree.detach().cpu() if isinstance(tree, torch.Tensor) else tree


def expectation(case: Case) -> Any:
    """What must come back: the ideal where JAX is wrong, then its last full pmap, then today's.

    ``LookupError`` when the case must raise instead.
    """
    for field in ("ideal", "legacy_expected", "expected"):
        if field in case:
            return case[field]
    raise LookupError(case["id"])


def must_raise(case: Case) -> bool:
    return not {"ideal", "legacy_expected", "expected"} & case.keys()


def check_error(error: Exception, case: Case) -> None:
    """AssertionError unless the exception says the same as JAX's."""
    check_raised([kind.__name__ for kind in type(error).__mro__], str(error), case)


def check_raised(kinds: list[str], text: str, case: Case) -> None:
    """The same for the names of a type and of its bases, and the message."""
    stored = [case[field] for field in ("expected_error", "legacy_error") if field in case]
    named = {error.get("builtin", error["type"]) for error in stored}
    # ValueError and IndexError are one there, and so are their relatives in JAX.
    wanted = named & {"NameError", "KeyError", "TypeError", "ZeroDivisionError"}
    wanted = wanted or {"ValueError", "IndexError"}
    assert wanted & set(kinds), f"{kinds[0]}: {text}, instead of one of {wanted}"
    assert "PmapError" not in kinds, text
    words = case["expected_error"].get("keywords", ())
    assert not [word for word in words if word.lower() not in text.lower()], text


def widened(case: Case) -> dict[str, str]:
    """Which dtypes may come back wider than JAX's 32-bit defaults made them, in this case."""
    stored = repr(case["inputs"])
    text = case["jax_expr"]
    if case.get("x64"):  # an index is int32 there too
        return {"int32": WIDER["int32"]} if "axis_index(" in text else {}
    has_index = "axis_index" in text or "axis_size" in text
    allowed = {}
    # Without an int32 input, JAX's int32 stands for int64, a sum of bools or a Python int.
    asked_for = "'int32'" in stored or "int32" in text
    if "int64" in stored or "'py': 'int'" in stored or has_index or not asked_for:
        allowed["int32"] = WIDER["int32"]
    for narrow in ("float32", "complex64"):
        if WIDER[narrow] in stored:
            allowed[narrow] = WIDER[narrow]
    return allowed


def check(actual: Any, expected: Any, wider: dict[str, str] | None = None, path: str = "result"):
    """AssertionError at the first difference of structure, shape, dtype or value."""
    if expected is None:
        assert actual is None, f"{path}: got {type(actual).__name__}, expected None"
        return
    kind = next(iter(expected))
    if kind == "dict":
        assert type(actual) is dict, f"{path}: got {type(actual).__name__}, expected dict"
        # Every pytree library returns dictionaries in an order of its own.
        assert actual.keys() == expected["dict"].keys(), f"{path}: keys {list(actual)}"
        for name, item in expected["dict"].items():
            check(actual[name], item, wider, f"{path}[{name!r}]")
    elif kind in ("tuple", "list"):
        assert type(actual).__name__ == kind, f"{path}: got {_kind(actual)}, expected {kind}"
        assert len(actual) == len(expected[kind]), f"{path}: {len(actual)} items"
        for index, item in enumerate(expected[kind]):
            check(actual[index], item, wider, f"{path}[{index}]")
    else:
        _check_leaf(actual, expected[kind], wider or {}, path)


def _check_leaf(actual: Any, stored: Any, wider: dict[str, str], path: str):
    assert hasattr(actual, "dtype"), f"{path}: got {_kind(actual)}, expected an array"
    array, dtype = _leaf(actual)
    shape, expected_dtype = stored["shape"], stored["dtype"]
    assert list(array.shape) == shape, f"{path}: shape {list(array.shape)}, not {shape}"
    allowed = (expected_dtype, wider.get(expected_dtype))
    assert dtype in allowed, f"{path}: {dtype}, not {expected_dtype}"
    rtol, atol = TOLERANCES.get(expected_dtype, (0.0, 0.0))
    expected = _array(stored)
    if expected.dtype != bool and expected.dtype.kind in "iu":
        expected, array = expected.astype(np.int64), array.astype(np.int64)
    np.testing.assert_allclose(
        array, expected, rtol, atol, equal_nan=True, err_msg=path, strict=False
    )


def _kind(value: Any) -> str:
    return type(value).__name__


def _leaf(leaf: Any) -> tuple[np.ndarray, str]:
    """numpy data and dtype name of a tensor (wherever it lives), a numpy array or a jax array."""
    dtype = re.sub(r"^torch\.", "", str(leaf.dtype))
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu()
        leaf = leaf.float().numpy() if dtype == "bfloat16" else leaf.numpy()
    array = np.asarray(leaf)
    return (array.astype(np.float32) if dtype == "bfloat16" else array), dtype


def _array(stored: dict[str, Any]) -> np.ndarray:
    dtype = "float32" if stored["dtype"] == "bfloat16" else stored["dtype"]
    return np.array(_numbers(stored["data"]), dtype).reshape(stored["shape"])


def _numbers(data: Any) -> Any:
    if isinstance(data, list):
        return [_numbers(item) for item in data]
    if isinstance(data, dict):
        return complex(float(data["re"]), float(data["im"]))
    return float(data) if isinstance(data, str) else data


def _plain(data: Any) -> Any:
    if isinstance(data, list):
        return [_plain(item) for item in data]
    if isinstance(data, complex):
        return {"re": _plain(data.real), "im": _plain(data.imag)}
    if isinstance(data, float) and not np.isfinite(data):
        return str(data)
    return data
