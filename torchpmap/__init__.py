"""torchpmap: SPMD programming for PyTorch.

``pmap`` maps a function over the devices of a machine; named-axis collectives work inside it, also
under ``torch.func``::

    import torch, torchpmap as tp

    normalize = tp.pmap(lambda x: x / tp.psum(x, "i"), axis_name="i")
    normalize(torch.arange(4.0))
"""

from importlib import import_module as _import
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

__version__ = "0.2.0"

_MODULES = ("checkpoint", "debug", "multihost", "optim", "profiler", "random")


def _find(name: str) -> _Any:
    """Import what is used, when it is used: a worker needs little of the package."""
    # "torch": pickle looks in all modules for what names none, as torch.contiguous_format, which
    # Inductor hashes
    if name == "torch" or (name.startswith("__") and name != "__all__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchpmap._base.imports import uncollected

    with uncollected():
        if name in _MODULES:
            return _import(f"torchpmap.{name}")
        api = _import("torchpmap._api")
    if name != "__all__" and name not in api.__all__:
        _import("torchpmap._base.jax_names").missing_in(__name__)(name)
    globals().update({public: getattr(api, public) for public in ("__all__", *api.__all__)})
    return globals()[name]


def _names() -> list[str]:
    return [*_import("torchpmap._api").__all__, *_MODULES, "__version__"]


if _TYPE_CHECKING:
    from torchpmap import checkpoint as checkpoint
    from torchpmap import debug as debug
    from torchpmap import multihost as multihost
    from torchpmap import optim as optim
    from torchpmap import profiler as profiler
    from torchpmap import random as random
    from torchpmap._api import *  # noqa: F403 - it has ``__all__``
else:  # a type checker that saw these would accept every name
    globals().update(__getattr__=_find, __dir__=_names)
