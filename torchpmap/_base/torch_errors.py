"""Errors of torch that only their text tells apart."""

from __future__ import annotations

import re

_LIMIT_OF_VMAP = re.compile(
    r"vmap|functorch|function transform|does not have a grad_fn|doesn't match the broadcast shape"
    r"|[Cc]annot access (storage|data pointer)|[Bb]atch norm got a batched tensor"
)
_NEEDS_A_VALUE = re.compile(
    r"trying to get value out of a tracing tensor|data-dependent|[Cc]annot access data pointer of "
    r"Tensor|numpy\(\) is not supported for tensor subclasses|\.tolist\(\) is not supported for "
    r"tensor subclasses|its data is not allocated yet"
)


def is_timeout(error: BaseException) -> bool:
    """Whether torch raised this because a collective took too long."""
    return bool(re.search(r"[Tt]imeout|[Tt]imed out", str(error)))


def is_limit_of_vmap(error: BaseException) -> bool:
    """Whether torch raised this because all rows run at once."""
    return isinstance(error, RuntimeError | TypeError) and bool(_LIMIT_OF_VMAP.search(str(error)))


def needs_a_value(error: BaseException) -> bool:
    """Whether torch raised this because Python asked for the value of a traced tensor."""
    return isinstance(error, RuntimeError | TypeError) and bool(_NEEDS_A_VALUE.search(str(error)))
