"""What operations write to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

_UNDECLARED = {
    **dict.fromkeys(
        [
            *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
            *("batch_norm_update_stats", "cudnn_batch_norm", "miopen_batch_norm"),
            "native_batch_norm",
        ],
        ("training", "running_mean", "running_var"),
    ),
    **dict.fromkeys(["_copy_from", "_copy_from_and_resize"], ("dst",)),
}
"""Arguments that an operation writes to though its schema does not say so (torch 2.13), unless its
argument ``training`` is false.
"""


def written_names(arguments: Sequence[Any]) -> list[str]:
    """Names of those arguments of a schema that the operation writes to."""
    return [a.name for a in arguments if a.alias_info and a.alias_info.is_write]


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operation writes to, and ``training`` before those
    that depend on it.
    """
    names = [argument.name for argument in func._schema.arguments]
    undeclared = _UNDECLARED.get(func._schema.name.removeprefix("aten::"), ())
    written = [*written_names(func._schema.arguments), *undeclared]
    return tuple((names.index(name), name) for name in written if name in names)


def written_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call of ``func`` writes to; for a list, its members."""
    written: list[Any] = []
    for place, name in written_arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        if name != "training":
            written += value if isinstance(value, list | tuple) else [value]
        elif not value:
            break
    return [value for value in written if value is not None]
