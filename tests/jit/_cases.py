"""A program that runs in plain torch, and jitted on devices; what is right is what torch gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _models import LINE, fully_sharded, placed
from _support import DEVICE, EAGER
from torch import nn

import torchpmap as tp
from torchpmap import P


def data(seed=0, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (8, 8)), dtype=dtype, generator=generator)


class Plain:
    """How a case runs in plain torch."""

    def jit(self, function: Any) -> Any:
        return function

    def put(self, x: Any) -> Any:
        """A module, or a tensor whose rows may be cut."""
        return x

    def model(self, *layers: nn.Module) -> Any:
        model = nn.Sequential(*(layers or (nn.Linear(8, 4),))).double()
        for k, parameter in enumerate(model.parameters()):
            parameter.data = data(k, *parameter.shape) / 2
        return self.put(model)

    def step(self, model: Any, *optimizers: Any, also: Any = lambda: None, **zero_grad: Any) -> Any:
        """A jitted step of training, which gives the loss; ``also`` is called at its end."""

        def step(*given: Any) -> Any:
            for each in optimizers:
                each.zero_grad(**zero_grad)
            loss = model(*given).square().mean()
            loss.backward()
            for each in optimizers:
                each.step()
            also()
            return loss.detach()

        return self.jit(step)

    def rows(self, count: int) -> list[Any]:
        return [self.put(data(k)) for k in range(count)]


class OnDevices(Plain):
    def __init__(self, layout: str, fullgraph: bool) -> None:
        self.layout, self.fullgraph = layout, fullgraph
        self.jitted: list[Any] = []

    def jit(self, function: Any) -> Any:
        self.jitted.append(tp.jit(function, compile=EAGER, fullgraph=self.fullgraph))
        return self.jitted[-1]

    def put(self, x: Any) -> Any:
        if isinstance(x, nn.Module):
            return placed(x, self.layout)
        spec = P() if self.layout == "replicated" else fully_sharded("", x.shape)
        return tp.device_put(x, tp.NamedSharding(tp.make_mesh(*LINE), spec))


class Cases(dict[str, tuple[Callable[..., list[Any]], int | None, bool]]):
    """Programs by their names."""

    def add(self, num_traces: int | None = None, fullgraph: bool = True) -> Callable[..., Any]:
        """Decorate one.

        num_traces: of all functions together, if it says something; fullgraph: of ``jit``.
        """

        def add(function: Any) -> Any:
            self[function.__name__] = function, num_traces, fullgraph
            return function

        return add

    def tests(self) -> Any:
        """A test of all, each with parameters on every device and cut."""

        @pytest.mark.filterwarnings("ignore:.*running operation by operation")
        @pytest.mark.filterwarnings("ignore:.*is on the devices, but its operation")
        @pytest.mark.parametrize("layout", ["replicated", "fully sharded"])
        @pytest.mark.parametrize("name", self)
        def test(name: str, layout: str) -> None:
            run, num_traces, fullgraph = self[name]
            on = OnDevices(layout, fullgraph)
            for mine, right in zip(run(on), run(Plain()), strict=True):
                if right is None:
                    assert mine is None
                    continue
                # float32 is for products in bfloat16, which other kernels may round otherwise
                rough = 1e-6 if DEVICE == "cpu" else 1e-3
                tolerance = rough if right.dtype == torch.float32 else 1e-12
                torch.testing.assert_close(
                    mine.detach().cpu(), right.detach(), atol=tolerance, rtol=tolerance
                )
            if num_traces is not None:
                assert sum(each.num_traces for each in on.jitted) == num_traces

        return test
