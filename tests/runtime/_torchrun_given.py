"""What every rank of test_torchrun.py gets when the ranks give different things to a new call, in a
place that all its rows share: as an argument, as what the function closes over.  See
``_torchrun_cases.py``.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _launched import Raised
from _torchrun_agreement import DIFFERS, Rank, seeded
from _torchrun_cases import (
    CASES,
    GRAPH,
    X,
    expect,
    expect_error,
    expect_same,
    in_both_modes,
    mapped,
    spanning,
)

import torchpmap as tp
from torchpmap import P

__all__ = ["CASES"]

ROW = torch.ones(1, 2)


def own(rank: Rank) -> torch.Tensor:
    return torch.full((2,), float(rank))


def times(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w


def shared(w: Any, compile: Any, function: Callable[..., Any] = times) -> Any:
    """A call with an argument that all rows share."""
    return mapped(function, compile, in_axes=(0, None))(ROW, w)


def closing_over(value: Any, compile: Any, **options: Any) -> Any:
    return mapped(lambda x: x * value, compile, **options)(ROW)


def of_a_module(rank: Rank, compile: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    torch.nn.init.constant_(model[0].weight, rank)
    return mapped(model, compile)(ROW)


def of_a_static_argument(rank: Rank, compile: Any) -> Any:
    value = own(rank)
    call = mapped(lambda x, g: g(x), compile, static_broadcasted_argnums=1)
    return call(ROW, lambda x: x * value)


def of_a_pmap_of_a_pmap(rank: Rank, compile: Any) -> Any:
    value = own(rank)
    return mapped(tp.pmap(lambda x: x * value), compile)(ROW[None])


def of_blocks(function: Callable[..., Any], compile: Any) -> Any:
    mesh = tp.make_mesh((tp.process_count(),), ("x",))
    return tp.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), compile=compile)


def on_blocks(given: torch.Tensor, value: torch.Tensor, compile: Any) -> Any:
    return of_blocks(lambda x: x * value, compile)(given.repeat(tp.process_count()))


def of_a_list(rank: Rank, compile: Any) -> Any:
    values = [own(0)] if rank == 0 else [own(0), own(0)]
    return mapped(lambda x: sum(values, x), compile)(ROW)


def a_second_time(rank: Rank, compile: Any) -> Any:
    value = own(rank)
    call = mapped(lambda x: x * value, compile)
    with contextlib.suppress(ValueError):
        call(ROW)
    return call(ROW)


def donating(rank: Rank, compile: Any) -> Any:
    x = tp.device_put(ROW, tp.local_devices())
    try:
        return mapped(times, compile, in_axes=(0, None), donate_argnums=0)(x, own(rank))
    finally:
        assert x.tolist() == ROW.tolist()  # it was not given up


GIVEN: dict[str, tuple[str, Callable[[Rank, Any], Any]]] = {
    "an_argument": ("argument w", lambda rank, compile: shared(own(rank), compile)),
    "a_part_of_an_argument": (
        "argument p['a'][0]",
        lambda rank, compile: shared(
            {"b": own(0), "a": [own(rank)]}, compile, lambda x, p: x * p["a"][0])),
    "an_array": ("argument w", lambda rank, compile: shared(own(rank).numpy(), compile)),
    "a_number": ("argument w", lambda rank, compile: shared(float(rank), compile)),
    "a_key": (
        "argument key",
        lambda rank, compile: shared(
            tp.random.key(rank), compile, lambda x, key: x + tp.random.normal(key, (2,)))),
    "an_argument_without_rows": (
        "argument w",
        lambda rank, compile: mapped(
            lambda w: -w, compile, in_axes=None, axis_size=tp.process_count())(own(rank))),
    "an_argument_beside_a_global_view": (
        "argument w", lambda rank, compile: mapped(times, compile)(spanning(), X * rank)),
    "an_argument_that_gets_a_gradient": (
        "argument w",
        lambda rank, compile: torch.func.grad(lambda w: shared(w, compile).sum())(own(rank))),
    "an_argument_in_a_vmap": (
        "argument w",
        lambda rank, compile: torch.func.vmap(lambda w: shared(w, compile))(own(rank))),
    "a_donating_call": ("argument w", donating),
    "a_closure": ("('value')", lambda rank, compile: closing_over(own(rank), compile)),
    "a_closure_a_second_time": ("('value')", a_second_time),
    "a_closure_that_requires_grad": (
        "('value')", lambda rank, compile: closing_over(own(rank).requires_grad_(), compile)),
    "a_closure_that_gets_a_gradient": (
        "('value')",
        lambda rank, compile: torch.func.grad(lambda w: closing_over(w, compile).sum())(own(rank))),
    "a_closure_of_a_module": ("(the function itself, 0.weight)", of_a_module),
    "a_list_that_is_a_closure": ("('values', number 2)", of_a_list),
    "a_closure_of_a_static_argument": ("('value')", of_a_static_argument),
    "a_closure_of_a_pmap_of_a_pmap": ("('value')", of_a_pmap_of_a_pmap),
    "a_seed_of_rows_that_draw_the_same": (
        "the seed of its random numbers",
        lambda rank, compile: seeded(
            mapped(lambda x: x * torch.rand(2), compile, randomness="same"), ROW, rank)),
    "an_argument_of_a_shard_map": (
        "argument x", lambda rank, compile: on_blocks(own(rank), own(0), compile)),
    "a_closure_of_a_shard_map": (
        "('value')", lambda rank, compile: on_blocks(own(0), own(rank), compile)),
}  # fmt: skip
"""What the error names, and a call to which the processes give different things."""


def _expect_differences(what: str, run: Callable[[Rank, Any], Any], name: str) -> None:
    def differ(compile: Any) -> Any:
        return run(tp.process_index(), compile)

    differ.__name__ = f"different_by_{name}"
    in_both_modes(expect_error(ValueError, f"{what} {DIFFERS}"))(differ)


for _name, (_what, _given) in GIVEN.items():
    _expect_differences(_what, _given, _name)


@expect_error(ValueError, f"('value') {DIFFERS}")
def different_by_a_closure_of_what_was_lowered():
    value = own(tp.process_index())
    call = mapped(lambda x: x * value)
    if tp.process_index() == 0:
        call.lower(ROW)  # it waits for no process
    return call.lower(ROW).compile()(ROW)


@in_both_modes(
    expect(
        lambda rank, count: Raised("ValueError", f"('value') {DIFFERS}") if rank < 2 else rank * ROW
    )
)
def different_by_a_closure_on_devices_of_some_processes(compile):
    rank = tp.process_index()
    devices = tp.devices()[:2] if rank < 2 else tp.local_devices()
    return closing_over(own(rank), compile, devices=devices)


@expect_same(None)
def one_process_alone_may_lower_a_shard_map():
    if tp.process_index() == 0:
        of_blocks(torch.neg, GRAPH).lower(torch.ones(tp.process_count()))


@in_both_modes(expect_same(torch.tensor([[12.0, 6.0]])))
def equal_arguments_and_closures_pass(compile):
    value, model = torch.tensor([2.0, 1.0]), torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight), torch.nn.init.ones_(model.bias)
    call = mapped(lambda x, n, p: model(x) * value * n * p["w"], compile, in_axes=(0, None, None))
    shares = [torch.ones(2), np.ones(2, np.float32), tp.replicate(torch.ones(2))]
    for share in shares if tp.process_index() == 0 else shares[:1] * 2 + shares[2:]:
        result = call(ROW, 2.0, {"w": share})
    return result


@in_both_modes(expect(lambda rank, count: 2 * ROW * rank))
def what_may_differ(compile):
    """Values on the device of a process, seeds where each row draws its own numbers, and calls that
    run in one process.
    """
    rank, value = tp.process_index(), own(tp.process_index())
    here = tp.replicate(value, tp.local_devices())
    seeded(mapped(lambda x: x * torch.rand(2), compile), ROW, rank)
    local = closing_over(value, compile, devices=tp.local_devices())
    with tp.debug.fake_pmap():
        shared(value, compile)
    return shared(here, compile) + local
