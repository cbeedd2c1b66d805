"""The first run of a plan on a device: whether it gives what tracing promised."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torchpmap._base.errors import kind_of
from torchpmap._base.pytree import map_tensors, tree_leaves
from torchpmap._base.torch_internals import (
    FakeTensorMode,
    HigherOrderOperator,
    TorchDispatchMode,
)
from torchpmap._trace.boxed import Boxed
from torchpmap._trace.compile import EAGER, Definition, has_users_operations
from torchpmap._trace.compiled_loops import SCANS, run_scan
from torchpmap._trace.custom_ops import NATIVE


def run_first_time(
    definition: Definition, runner: Boxed, blocks: list[torch.Tensor], where: str
) -> tuple[Sequence[torch.Tensor], Boxed]:
    """Run a plan for the first time: its results, and how to run it from then on.

    Later code relies on what tracing promised: the shapes and dtypes of the results, and that they
    are contiguous (Inductor's code for later plans reads them so).  A wrong fake kernel, or a
    setting that the device does not have, breaks the promise in every run: checking one is enough.
    """
    with _Promises(definition, where) if has_users_operations(definition.graph) else nullcontext():
        results = runner(blocks)
    kinds = [
        kind_of(x.shape, x.dtype) if isinstance(x, torch.Tensor) else type(x).__name__
        for x in results
    ]
    promised = [kind_of(*kind) for kind in definition.outputs]
    # Fake kernels of torch (2.11: attention in float64; 2.15: layer_norm under autocast) promise
    # other dtypes of what a backward pass needs.  Without compiled code, nothing relies on it.
    count = len(promised) - (definition.num_residuals if definition.backend == EAGER else 0)
    if kinds[:count] != promised[:count]:
        raise RuntimeError(
            f"{definition.name}: it gives other values than it was traced to give. It gave "
            f"{', '.join(kinds)} {where}, but tracing promised {', '.join(promised)}. Either it "
            "depends on a setting that the devices do not have, or the backend compiles it wrong; "
            "compile=False runs it without such a promise."
        )
    if all(x.is_contiguous() for x in results):
        return results, runner

    def run(blocks: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [x.contiguous() for x in runner(blocks)]

    return [x.contiguous() for x in results], run


class _Promises(TorchDispatchMode):
    """Compares the results of the user's operations with what their fake kernels promise: compiled
    code would read beyond the end of a smaller result.
    """

    supports_higher_order_operators = True

    def __init__(self, definition: Definition, where: str) -> None:
        super().__init__()
        self._definition = definition
        self._where = where
        # a dispatch mode switches autograd off, but an operation may use it inside
        dispatch = torch._C
        self._dispatch_keys = (
            dispatch._dispatch_tls_local_include_set(),
            dispatch._dispatch_tls_local_exclude_set(),
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # a loop or a branch
            return func(*map(self._watched, args), **kwargs)
        if func in SCANS:
            with self:
                return run_scan(*args, **kwargs)
        if func.namespace in NATIVE:
            return func(*args, **kwargs)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            given = map_tensors(mode.from_tensor, (args, kwargs))
            promised = func(*given[0], **given[1])
        with torch._C._ForceDispatchKeyGuard(*self._dispatch_keys):
            results = func(*args, **kwargs)
        strides = self._definition.backend != EAGER  # which accepts any strides
        for got, fake in zip(tree_leaves(results), tree_leaves(promised), strict=True):
            mine, theirs = _described(got, strides), _described(fake, strides)
            if mine != theirs:
                raise RuntimeError(
                    f"{self._definition.name}: the operation {func.name()} gives {mine} "
                    f"{self._where}, but its fake kernel (torch.library.register_fake) promises "
                    f"{theirs}. Correct the fake kernel; compile=False runs without it."
                )
        return results

    def _watched(self, argument: Any) -> Any:
        def body(*args: Any) -> Any:
            with self:
                return argument(*args)

        return body if isinstance(argument, torch.fx.GraphModule) else argument


def _described(value: Any, strides: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    kind = kind_of(value.shape, value.dtype)
    if not strides or not value.numel():
        return f"{kind} ({value.device.type})"
    steps = zip(value.shape, value.stride(), strict=True)
    listed = [step if size > 1 else 0 for size, step in steps]
    return f"{kind} ({value.device.type}, strides {listed})"
