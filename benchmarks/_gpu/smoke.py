"""Whether anything works at all: each kind of program once, compared with plain torch."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import torchpmap as tp
from _gpu.bench import EAGER, Bench, near

X = torch.linspace(-1.0, 1.0, 24).reshape(1, 4, 6)


def programs(bench: Bench) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Name -> what gives a result and what it must be."""
    mapped, made = functools.partial(_mapped, bench.compile), bench.compile
    torch.manual_seed(0)
    table = torch.arange(6.0)
    layer = torch.nn.LSTM(6, 5, batch_first=True)
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def constants(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(6, device=x.device) + torch.full((6,), 2.0, device=x.device)

    def recurrent(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, weights, (x,))[0]

    def dropped() -> tuple[Any, Any]:
        y = tp.pmap(lambda x: F.dropout(x, 0.5), compile=made)(torch.ones(1, 10_000)).cpu()
        kept = (y != 0).float()
        assert abs(kept.mean() - 0.5) < 0.03, kept.mean()  # six standard deviations
        return y, 2 * kept

    return {
        "x * 2": lambda: (mapped(lambda x: x * 2, X), X * 2),
        "psum": lambda: (mapped(lambda x: tp.psum(x, "i"), X), X),
        "all_gather": lambda: (mapped(lambda x: tp.all_gather(x, "i"), X), X[None]),
        "dropout": dropped,
        "LSTM": lambda: (
            mapped(recurrent, weights, X, in_axes=(None, 0), compile=False),
            layer(X)[0],
        ),
        "compile=False with a closure": lambda: (
            mapped(lambda x: x + table, X, compile=False),
            X + table,
        ),
        "a closure, compiled": lambda: (mapped(lambda x: x + table, X), X + table),
        "constants": lambda: (mapped(constants, X), constants(X)),
        "constants, compile=False": lambda: (mapped(constants, X, compile=False), constants(X)),
        "keys": lambda: (
            mapped(lambda key: tp.random.normal(key, (8,)), tp.random.key(3)[None])[0],
            tp.random.normal(tp.random.key(3), (8,)),
        ),
    }


def derivatives(bench: Bench) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """The same, of gradients."""
    mapped = functools.partial(_mapped, bench.compile)
    torch.manual_seed(1)
    w = torch.randn(6, 6)
    q, k, v = torch.randn(3, 1, 2, 16, 32)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ w).square().sum()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    return {
        "gradient": lambda: (
            mapped(tp.grad(loss), w, X, in_axes=(None, 0))[0],
            torch.func.grad(loss)(w, X[0]),
        ),
        "attention, with its gradient": lambda: (
            mapped(tp.grad(attention), q, k, v),
            torch.func.grad(attention)(q, k, v),
        ),
    }


def _mapped(default: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return tp.pmap(function, "i", **{"compile": default, **options})(*args)


def dtypes(bench: Bench) -> None:
    """bfloat16, float8 and float64 come and go, and are computed with."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float64):
        with bench.part(str(dtype)):
            x = X.to(dtype)
            double = tp.pmap(
                lambda x, dtype=dtype: (x.float() * 2).to(dtype), compile=bench.compile
            )
            passed = double(x).cpu().float().equal((x.float() * 2).to(dtype).float())
            bench.check(str(dtype), passed)


def checkpoint(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        state = {"x": tp.pmap(lambda x: x * 3, compile=EAGER)(X), "step": 7}
        tp.checkpoint.save(f"{folder}/saved", state)
        loaded = tp.checkpoint.load(f"{folder}/saved", like=state)
        bench.check("checkpoint", near(loaded["x"], X * 3) and loaded["step"] == 7)


def no_context(bench: Bench) -> None:
    """The controller must not use a GPU before it traces a backward pass: it would hold half a GB
    of each.
    """
    bench.check("this process has not initialised CUDA", not torch.cuda.is_initialized())
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        pids = subprocess.run(query, capture_output=True, text=True).stdout.split()
        bench.check("nvidia-smi does not list this process", str(os.getpid()) not in pids, pids)


def run(bench: Bench) -> None:
    tp.init(1)
    bench.check("one device", str(tp.devices()) == f"[Device({bench.device_type}:0)]", tp.devices())
    compare(bench, programs(bench))
    dtypes(bench)
    with bench.part("checkpoint"):
        checkpoint(bench)
    with bench.part("the controller"):
        no_context(bench)
    compare(bench, derivatives(bench))


def compare(bench: Bench, programs: dict[str, Callable[[], tuple[Any, Any]]]) -> None:
    for name, program in programs.items():
        with bench.part(name):
            got, expected = program()
            # a GPU multiplies in TF32 or in another order
            bench.check(name, near(got, expected, 2e-3), got)
