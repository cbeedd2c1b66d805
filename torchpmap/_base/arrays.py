"""Numpy's arrays and scalars in the form that torch takes."""

from __future__ import annotations

from typing import Any

import numpy as np


def for_torch(value: Any) -> Any:
    """An array that ``torch.tensor`` takes, of the same values; anything else as it is.

    torch knows one of numpy's two unsigned types of 64 bits, no scalar of it above 2**63, and
    no other order of bytes than the machine's.
    """
    if not isinstance(value, np.ndarray | np.generic):
        return value
    kind = value.dtype.newbyteorder("=")
    if kind.kind in "iu":
        kind = np.dtype(f"{kind.kind}{kind.itemsize}")
    return np.asarray(value, kind)
