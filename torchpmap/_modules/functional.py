"""``functional``: a module as parameters, buffers and a pure function, for mapped programs.

torch's batch norm writes its running statistics in place, and knows only the rows of its device.
While ``apply`` runs a module, a mode of torch functions takes the place of batch norms that train:
they are computed from operations that differentiate, batch and communicate, and their new running
statistics are results.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from torchpmap._base.boundary import boundary
from torchpmap._collectives.operands import AxisName
from torchpmap._collectives.queries import axis_size
from torchpmap._collectives.reduce import pmean, psum
from torchpmap._sharded.layers import per_channel, promoted

Tensors = dict[str, torch.Tensor]


class Functional(NamedTuple):
    """A module as values and a pure function of them."""

    params: Tensors
    """The parameters that require grad, by name."""
    buffers: Tensors
    """The buffers, and the parameters that are frozen, by name."""
    apply: Callable[..., tuple[Any, Tensors]]
    """``apply(params, buffers, *args, **kwargs)`` -> (what the module returns, new buffers)."""


@boundary
def functional(module: nn.Module, axis_name: AxisName = ()) -> Functional:
    """Return the parameters and buffers of a module, and ``apply``, a pure function of them.

    functional: module -> (params: dict, buffers: dict, apply)
    apply: (params, buffers, *args, **kwargs) -> (output, buffers)

    ``apply`` runs the module with these values and writes to none of them: buffers that the module
    changes, such as the running statistics of a batch norm, come back as new values. It works
    inside ``pmap``, ``vmap`` and ``grad``: return the buffers as ``aux``. Whether it trains or
    evaluates is what ``module.train()`` and ``module.eval()`` say when it is called.

    Batch norms use the statistics of the rows of all members of ``axis_name``, as one device with
    the whole batch would. ``apply(..., batch_mask=mask)`` leaves the rows out of them whose mask is
    False (``shard_batch`` makes such masks); ``mask`` is bool, one per row.

    Args:
        module: any module. Its tensors are not copied, and are never written to.
        axis_name: names of the mapped axes over which a batch is cut; none: each batch norm sees
            the rows it is given, as in ``DistributedDataParallel``.

    Returns:
        A tuple of ``params``, the parameters that require grad; ``buffers``, all other parameters
        and buffers; and ``apply``. ``module.load_state_dict({**params, **buffers}, strict=False)``
        puts trained values back.

    Raises:
        TypeError: ``module`` is no ``nn.Module``.
        ValueError: (``apply``) a parameter or a buffer is missing; ``batch_mask`` does not fit the
            rows of a batch norm; or a batch norm has only one value per channel.

    Example:
        >>> import torch, torchpmap as tp
        >>> params, buffers, apply = tp.functional(torch.nn.BatchNorm1d(1), axis_name="i")
        >>> train = tp.pmap(apply, "i", in_axes=(None, None, 0), out_axes=(0, None))
        >>> x = torch.arange(8.0).reshape(4, 2, 1)
        >>> y, buffers = train(params, buffers, x)
        >>> buffers["running_mean"], x.mean() * 0.1
        (ShardedTensor([0.3500], replicated on cpu:0 cpu:1 cpu:2 cpu:3), tensor(0.3500))

    Source: ``flax.linen.Module.init`` and ``apply(..., mutable=["batch_stats"])``, and
        ``axis_name`` and ``mask`` of ``flax.linen.BatchNorm``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"functional takes an nn.Module, but got a {type(module).__name__}.")
    named = dict(module.named_parameters())
    params = {name: value.detach() for name, value in named.items() if value.requires_grad}
    frozen = {name: value.detach() for name, value in named.items() if not value.requires_grad}
    buffers = {name: value.detach() for name, value in module.named_buffers()}

    apply = _Apply(module, axis_name, frozenset(frozen), named.keys() | buffers.keys())
    return Functional(params, frozen | buffers, apply)


@dataclass(frozen=True)
class _Apply:
    """Runs a module as a pure function."""

    module: nn.Module
    axis_name: AxisName
    frozen: frozenset[str]
    names: Set[str]
    """Of all parameters and buffers; of tied ones the first."""

    def __call__(
        self,
        params: Tensors,
        buffers: Tensors,
        *args: Any,
        batch_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Tensors]:
        self._insist_on_names(params.keys() | buffers.keys())
        values = dict(params)
        # the module may write to its buffers
        values |= {name: x if name in self.frozen else x.clone() for name, x in buffers.items()}
        with _BatchNorms(self.axis_name, batch_mask) as norms:
            output = torch.func.functional_call(self.module, values, args, kwargs)
        return output, {name: norms.latest(values[name]) for name in buffers}

    def _insist_on_names(self, given: Set[str]) -> None:
        """torch would use the module's own tensors for names that are missing."""
        if missing := self.names - given:
            raise ValueError(
                f"apply: params and buffers have no {sorted(missing)[0]!r}, which "
                f"{type(self.module).__name__} needs. Pass all that functional() returned."
            )
        if unknown := given - self.names - self.module.state_dict(keep_vars=True).keys():
            raise ValueError(
                f"apply: {type(self.module).__name__} has no parameter or buffer "
                f"{sorted(unknown)[0]!r}. It has {', '.join(sorted(self.names)[:3])} ..."
            )


class _BatchNorms(TorchFunctionMode):
    """Takes the place of batch norms that train."""

    def __init__(self, axis_name: AxisName, mask: torch.Tensor | None) -> None:
        self._axes = axis_name
        self._mask = mask
        self._updates: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id of a buffer -> the buffer, which must live while its id is used, and its value."""

    def latest(self, buffer: torch.Tensor) -> torch.Tensor:
        """The value of a buffer after all batch norms so far."""
        return self._updates[id(buffer)][1] if id(buffer) in self._updates else buffer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if func is F.instance_norm:
            return self._instance_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _batch_norm(
        self,
        x: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not training:
            return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        wide = promoted(x)
        count = self._count(x)
        mean = self._mean(wide, count)
        centred = wide - per_channel(mean, x)
        var = self._mean(centred.square(), count)
        self._note(running_mean, mean, momentum, count > 1)
        self._note(running_var, var * (count / (count - 1)), momentum, count > 1)
        y = centred * per_channel((var + eps).rsqrt(), x)
        if weight is not None:
            y = y * per_channel(weight, x)
        if bias is not None:
            y = y + per_channel(bias, x)
        return y.to(x.dtype)

    def _instance_norm(
        self,
        x: torch.Tensor,
        running_mean: torch.Tensor | None = None,
        running_var: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        """Each row has statistics of its own; the running ones take the mean over the rows."""
        if not use_input_stats or running_mean is None or running_var is None:
            known = running_mean, running_var, weight, bias, use_input_stats
            return F.instance_norm(x, *known, momentum, eps)
        wide = promoted(x)
        var, mean = torch.var_mean(wide, list(range(2, x.dim())))  # [N, C]
        rows = self._count(x) / (x.numel() // (x.shape[0] * x.shape[1]))
        self._note(running_mean, self._mean(mean, rows), momentum, rows > 0)
        self._note(running_var, self._mean(var, rows), momentum, rows > 0)
        return F.instance_norm(x, None, None, weight, bias, True, momentum, eps)

    def _count(self, x: torch.Tensor) -> Any:
        """How many numbers per channel the statistics are of."""
        each = x.numel() // (x.shape[0] * x.shape[1])
        if self._mask is None:
            count = x.shape[0] * each * axis_size(self._axes)
            if count == 1:
                raise ValueError(
                    "apply: a batch norm that trains expects more than 1 value per channel, but "
                    f"got an input of shape {list(x.shape)}. Give it more rows."
                )
            return count
        if self._mask.shape != x.shape[:1]:
            raise ValueError(
                f"apply: batch_mask has shape {list(self._mask.shape)}, but a batch norm of the "
                f"module got an input of shape {list(x.shape)}. The mask must have one bool per "
                "row of dim 0; a module that folds other dims into dim 0 cannot use it."
            )
        return each * psum(self._mask.sum(), self._axes)

    def _mean(self, values: torch.Tensor, count: Any) -> torch.Tensor:
        """[N, C, ...] -> [C]: the mean over the rows of all members."""
        dims = [dim for dim in range(values.dim()) if dim != 1]
        if self._mask is None:
            return pmean(values.mean(dims), self._axes)
        mask = self._mask.view(-1, *[1] * (values.dim() - 1))
        total = torch.where(mask, values, 0).sum(dims)
        return psum(total, self._axes) / count

    def _note(
        self, buffer: torch.Tensor | None, value: torch.Tensor, momentum: float, is_known: Any
    ) -> None:
        """``is_known``: whether there were enough real rows for a value."""
        if buffer is None:
            return
        old = self.latest(buffer)
        new = torch.lerp(old, value.detach().to(old.dtype), momentum)
        if isinstance(is_known, torch.Tensor):
            new = torch.where(is_known, new, old)
        self._updates[id(buffer)] = buffer, new
