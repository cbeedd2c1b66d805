"""What the tests of a pmap of a pmap share: mapping over rows and columns, on eight devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from _support import EAGER

import torchpmap as tp

NAMES = ("rows", "cols")


def nested(f: Callable[..., Any], inner: dict[str, Any] | None = None, **outer: Any) -> Any:
    return tp.pmap(tp.pmap(f, "cols", **(inner or {})), "rows", **{"compile": EAGER, **outer})


def mesh_of(y: Any) -> dict[Any, int]:
    return dict(y.sharding.mesh.shape)


def same(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-12, atol=1e-12)
