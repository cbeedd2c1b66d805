"""Compute a mapped function in three ways and compare, for ``torchpmap.debug.check_pmap``.

    serial    row by row in plain Python; rows meet at collectives (``_transforms/rows``)
    vmapped   all rows under one vmap in the calling process (``_transforms/inline``)
    pmapped   on the devices, compiled as ``compile`` says

The three share the rules of the collectives and little else, so a number that differs points at the
function (it depends on something that it should not), or at a bug of one way.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from torchpmap._base.axis_spec import OUT_AXES_HINT, broadcast_axes, canonical_axis
from torchpmap._base.errors import kind_of
from torchpmap._base.pytree import Structure, flatten
from torchpmap._base.torch_errors import is_limit_of_vmap
from torchpmap._runtime import inline_mode
from torchpmap._sharded.transfer import host_tensor
from torchpmap._trace.effects import distances, wide
from torchpmap._transforms.arguments import Options, split_statics
from torchpmap._transforms.call import CallArguments, Static
from torchpmap._transforms.pmap import Pmapped
from torchpmap._transforms.row_preparation import RowPreparation

_TOLERANCES = {
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (2e-2, 1e-2),
    torch.float32: (1e-4, 1e-5),
    torch.float64: (1e-7, 1e-9),
    torch.complex64: (1e-4, 1e-5),
    torch.complex128: (1e-7, 1e-9),
}
"""(rtol, atol) by dtype, as the ways add in different orders; other dtypes must be equal."""


@dataclass(frozen=True)
class CheckReport:
    """What ``check_pmap`` compared and found equal.

    Args:
        name: of the function.
        num_outputs: leaves of its result.
        num_gradients: floating-point leaves of its arguments that have a gradient.
        values: the ways whose values were compared.
        gradients: the ways whose gradients were compared.
        skipped: what could not be compared, and why.
        largest_difference: between any two numbers that should be equal.
    """

    name: str
    num_outputs: int
    num_gradients: int
    values: tuple[str, ...]
    gradients: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    largest_difference: float

    def __str__(self) -> str:
        what = f"largest difference {self.largest_difference:.3g}"
        lines = [f"check_pmap({self.name}): equal, {what}"]
        lines.append(f"  values ({self.num_outputs}): {', '.join(self.values)}")
        if len(self.gradients) > 1:
            lines.append(f"  gradients ({self.num_gradients}): {', '.join(self.gradients)}")
        lines += [f"  not compared: {what}, because: {why}" for what, why in self.skipped]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Answer:
    """What one way computed."""

    way: str
    structure: Structure
    outputs: list[torch.Tensor | None]
    gradients: list[torch.Tensor] | None
    """To each leaf of ``_Problem.differentiated``; None if this way has none."""
    no_gradients_because: str = ""


@dataclass(frozen=True)
class _Problem:
    """A function and the arguments of one call of it."""

    fun: Callable[..., Any]
    options: Options
    call: CallArguments
    differentiated: tuple[int, ...]
    """Leaves that gradients are taken to."""
    tolerances: tuple[float | None, float | None]
    """(rtol, atol), None: those of the dtype."""
    generator: torch.Tensor
    """State of torch's generator: random numbers are the same in every way."""

    def leaves(self) -> list[Any]:
        """The arguments, as copies that nothing else can write to."""
        return [
            leaf.detach().clone().requires_grad_(k in self.differentiated)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for k, leaf in enumerate(self.call.leaves)
        ]

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = [leaf.value if isinstance(leaf, Static) else leaf for leaf in leaves]
        args, kwargs = self.call.structure.unflatten(values)
        return args, kwargs

    def gradients(
        self, outputs: Sequence[Any], weights: Sequence[torch.Tensor | None], leaves: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Gradients of the weighted sum of all floating-point outputs."""
        pairs = [
            (output, weight)
            for output, weight in zip(outputs, weights, strict=True)
            if weight is not None and output.requires_grad
        ]
        inputs = [leaves[k] for k in self.differentiated]
        if not pairs or not inputs:
            return [torch.zeros_like(x) for x in inputs]
        floating, cotangents = zip(*pairs, strict=True)
        return list(torch.autograd.grad(floating, inputs, cotangents, materialize_grads=True))


@torch.enable_grad()  # else there are no gradients
@torch.inference_mode(False)
def check(
    fun: Callable[..., Any],
    options: Options,
    args: tuple[Any, ...],
    tolerances: tuple[float | None, float | None],
    gradients: bool,
) -> CheckReport:
    """Compute in three ways and compare; raises ``AssertionError`` where they differ."""
    for name, given in zip(("rtol", "atol"), tolerances, strict=True):
        if given is not None and not given >= 0:
            raise ValueError(f"check_pmap: {name} must be 0 or more, but got {given!r}.")
    call = RowPreparation(fun, options).arguments_of(*split_statics(options, args, {}))
    leaves = [
        _host(leaf) if isinstance(leaf, torch.Tensor | np.ndarray) else leaf for leaf in call.leaves
    ]
    floating = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor) and _is_real(x)]
    differentiated = tuple(floating if gradients else ())
    state = torch.default_generator.get_state()
    call = replace(call, leaves=leaves)
    problem = _Problem(fun, options, call, differentiated, tolerances, state)
    reference = _serial(problem)
    answers, skipped = [reference], []
    try:
        with inline_mode.chosen(True):
            answers.append(_mapped(problem, "vmapped"))
    except Exception as error:
        if not is_limit_of_vmap(error):
            raise
        skipped.append(("vmapped", str(error).partition("\n")[0]))
    with inline_mode.chosen(False):
        pmapped = _mapped(problem, "pmapped")
    answers.append(pmapped)
    if differentiated and pmapped.gradients is None:
        skipped.append(("the gradients of pmapped", pmapped.no_gradients_because))
    largest = max(_compare(problem, reference, answer) for answer in answers[1:])
    return CheckReport(
        options.name,
        sum(output is not None for output in reference.outputs),
        len(differentiated),
        tuple(answer.way for answer in answers),
        tuple(a.way for a in answers if a.gradients is not None) if differentiated else (),
        tuple(skipped),
        largest,
    )


def _host(value: Any) -> torch.Tensor:
    """A plain CPU tensor without history."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else host_tensor(value)


def _is_real(value: torch.Tensor | None) -> bool:
    return value is not None and value.is_floating_point()


# -- the ways --------------------------------------------------------------------------------------


def _mapped(problem: _Problem, way: str) -> _Answer:
    torch.default_generator.set_state(problem.generator)
    leaves = problem.leaves()
    args, kwargs = problem.arguments(leaves)
    outputs, structure = flatten(Pmapped(problem.fun, problem.options)(*args, **kwargs))
    found, why = None, ""
    if problem.differentiated:
        weights = [
            _weight(k, y.shape, y.dtype) if _is_real(y) else None for k, y in enumerate(outputs)
        ]
        try:
            found = problem.gradients(outputs, weights, leaves)
        except NotImplementedError as error:
            if way != "pmapped":
                raise
            why = str(error)
    values = [None if y is None else _host(y) for y in outputs]
    return _Answer(way, structure, values, found, why)


def _weight(number: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The same numbers for output ``number`` in every way and every run."""
    drawn = np.random.default_rng(number).standard_normal(tuple(shape))
    return torch.as_tensor(drawn, dtype=dtype, device="cpu")


def _serial(problem: _Problem) -> _Answer:
    """A serial call cannot be differentiated from outside, so gradients are taken in the rows."""
    options, call = problem.options, problem.call
    numbers = itertools.count()  # rows begin one after the other
    gradients: dict[int, list[torch.Tensor]] = {}

    def in_row(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        row = next(numbers)
        leaves, _ = flatten(split_statics(options, args, kwargs))
        for k in problem.differentiated:
            leaves[k] = leaves[k].detach().requires_grad_()
        # clones, because torch forbids the function to write to leaves that require grad
        given = [x.clone() if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = problem.arguments(given)
        returned = fun(*args, **kwargs)
        values, structure = flatten(returned)
        outputs = [None if value is None else torch.as_tensor(value) for value in values]
        axes = broadcast_axes(options.out_axes, returned, what="pmap out_axes", hint=OUT_AXES_HINT)
        weights = [
            _row_weight(number, y, axis, row, call.size) if y is not None and _is_real(y) else None
            for number, (y, axis) in enumerate(zip(outputs, axes, strict=True))
        ]
        gradients[row] = problem.gradients(outputs, weights, leaves)
        return structure.unflatten([None if y is None else y.detach() for y in outputs])

    torch.default_generator.set_state(problem.generator)
    args, kwargs = problem.arguments(problem.leaves())
    mapped = Pmapped(functools.partial(in_row, problem.fun), options)  # its parameters are found
    with inline_mode.chosen(True, serial=True):
        outputs, structure = flatten(mapped(*args, **kwargs))
    rows = [gradients[row] for row in range(call.size)]
    axes = [call.axes[k] for k in problem.differentiated]
    whole = [
        torch.stack(parts).sum(0) if dim is None else torch.stack(parts, dim)
        for dim, *parts in zip(axes, *rows, strict=True)
    ]
    return _Answer("serial", structure, [None if y is None else _host(y) for y in outputs], whole)


def _row_weight(
    number: int, output: torch.Tensor, axis: int | None, row: int, size: int
) -> torch.Tensor:
    if axis is None:  # each row accounts for an equal part of the one value (as in jax)
        return _weight(number, output.shape, output.dtype) / size
    dim = canonical_axis(axis, output.dim() + 1, what="pmap out_axes", path="the output")
    shape = [*output.shape[:dim], size, *output.shape[dim:]]
    return _weight(number, shape, output.dtype).select(dim, row)


# -- comparing -------------------------------------------------------------------------------------


def _kind(value: torch.Tensor | None) -> str | None:
    return None if value is None else kind_of(value.shape, value.dtype)


def _compare(problem: _Problem, reference: _Answer, answer: _Answer) -> float:
    """The largest difference; raises ``AssertionError`` if one is too large."""
    name = problem.options.name
    if answer.structure != reference.structure:
        raise AssertionError(
            f"check_pmap({name}): the structure of the result differs: serial gives "
            f"{reference.structure} and {answer.way} gives {answer.structure}."
        )
    paths = reference.structure.paths(f"the output of {name}")
    pairs = [*zip(paths, reference.outputs, answer.outputs, strict=True)]
    if answer.gradients is not None and reference.gradients is not None:
        paths = [
            f"the gradient to argument {problem.call.paths[k]}" for k in problem.differentiated
        ]
        pairs += zip(paths, reference.gradients, answer.gradients, strict=True)
    largest = 0.0
    for path, expected, got in pairs:
        kinds = _kind(expected), _kind(got)
        if kinds[0] != kinds[1]:
            raise AssertionError(
                f"check_pmap({name}): {path} differs: serial gives {kinds[0]} and {answer.way} "
                f"gives {kinds[1]}."
            )
        if expected is not None and got is not None and expected.numel():
            where = f"check_pmap({name}): {path} differs", answer.way
            largest = max(
                largest, _distance(where, _host(expected), _host(got), *problem.tolerances)
            )
    return largest


def _distance(
    where: tuple[str, str],
    expected: torch.Tensor,
    got: torch.Tensor,
    rtol: float | None,
    atol: float | None,
) -> float:
    """As ``torch.testing.assert_close``, whose text has not the two numbers, and which takes all
    complex numbers with a NaN for equal.
    """
    usual = _TOLERANCES.get(expected.dtype)
    allowed = [
        0.0 if usual is None else default if given is None else given
        for default, given in zip(usual or (0.0, 0.0), (rtol, atol), strict=True)
    ]
    distance = distances(got, expected)
    excess = distance - (allowed[1] + allowed[0] * wide(expected).abs().nan_to_num(0.0, 0.0))
    worst = int(excess.argmax())
    if excess.flatten()[worst] <= 0:
        return float(distance.max())
    index = tuple(int(k) for k in np.unravel_index(worst, expected.shape))
    at = f" at index {index}" if index else ""
    raise AssertionError(
        f"{where[0]}{at}: serial gives {expected[index].item()!r} and {where[1]} gives "
        f"{got[index].item()!r} (difference {float(distance.flatten()[worst]):g}, allowed "
        f"{allowed[1]:g} + {allowed[0]:g} * |serial|); {int((excess > 0).sum())} of "
        f"{expected.numel()} elements differ."
    )
