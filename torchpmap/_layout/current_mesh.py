"""The mesh of a block of code: ``shard_map`` and ``device_put`` take it where none is given."""

from __future__ import annotations

from contextvars import ContextVar, Token

from torchpmap._base.boundary import boundary
from torchpmap._layout.mesh import Mesh

_current: ContextVar[Mesh | None] = ContextVar("torchpmap_mesh", default=None)

current_mesh = _current.get


class _Setting:
    """What ``set_mesh`` returns: as a context manager, it restores the mesh from before."""

    def __init__(self, token: Token[Mesh | None], mesh: Mesh | None) -> None:
        self._token: Token[Mesh | None] | None = token
        self._mesh = mesh

    def __enter__(self) -> Mesh | None:
        if self._token is None:
            raise RuntimeError(_LEFT)
        return self._mesh

    def __exit__(self, *_: object) -> None:
        if self._token is None:
            raise RuntimeError(_LEFT)
        token, self._token = self._token, None
        try:
            _current.reset(token)
        except ValueError:  # of another context
            raise RuntimeError(_ELSEWHERE) from None


_LEFT = (
    "set_mesh: this context was left already, and the mesh from before it is back. Call "
    "torchpmap.set_mesh(mesh) again for each `with` block."
)
_ELSEWHERE = (
    "set_mesh: this context was entered in another thread or task, where its mesh stays. Enter and "
    "leave it in the same one."
)


@boundary
def set_mesh(mesh: Mesh | None) -> _Setting:
    """Make ``mesh`` the one that ``shard_map`` and ``device_put(x, P(...))`` use in this thread.

    As a context manager it holds for the block, otherwise until the next call.  None takes it away.

    Raises:
        TypeError: ``mesh`` is something else.
        RuntimeError: one context is used for two blocks, or left in another thread.

    Example:
        >>> import torch, torchpmap as tp
        >>> with tp.set_mesh(tp.make_mesh((2, 2), ("x", "y"))):
        ...     total = tp.shard_map(lambda a: tp.psum(a, "y"), in_specs=tp.P("x", "y"),
        ...                          out_specs=tp.P("x"))
        ...     total(torch.ones(2, 4)).tolist()
        [[2.0, 2.0], [2.0, 2.0]]

    Source: ``jax.set_mesh``.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"set_mesh takes a torchpmap.Mesh, but got {type(mesh).__name__}.")
    return _Setting(_current.set(mesh), mesh)
