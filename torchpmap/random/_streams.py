"""Random numbers inside a mapped function: ``torch.randn``, dropout and relatives, per axis index.

torch's generators are state, and every device would have its own.  So inside a mapped function
torch's random functions draw from explicit keys.  The caller's generator gives one key per call,
which gives a key for each draw and row::

    key of the call -- (number of the draw, row) -- fold_in(row of an inner pmap or vmap)

So the numbers of a row depend on ``torch.manual_seed``, on the row's index and on nothing else: not
on how many devices there are, how the rows lie on them, or whether the function is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from torchpmap._base.torch_internals import (
    add_batch_dim,
    function_modes,
    innermost,
    is_vmap,
    is_vmap_wrapper,
    layers,
    level_of,
    size_and_randomness,
    transforms,
)
from torchpmap.random._choices import permutation
from torchpmap.random._continuous import exponential, normal, uniform
from torchpmap.random._integers import bernoulli, randint
from torchpmap.random._keys import fold_in
from torchpmap.random._threefry import threefry2x32

_WORD = 2**32
# torch's own text
_ERROR_MODE = (
    "vmap: called random operation while in randomness error mode. Please either use the 'same' or "
    "'different' randomness flags on vmap or perform the randomness operation out of vmap"
)
_Sample = Callable[..., torch.Tensor]


def new_seed() -> torch.Tensor:
    """A stand-in for the key of a call while a function is traced."""
    return torch.zeros(2, dtype=torch.int64, device="cpu")


def draw_key() -> torch.Tensor:
    """The key of a call, from torch's default generator."""
    return torch.randint(0, _WORD, (2,), device="cpu")


def peek_key() -> torch.Tensor:
    """What ``draw_key`` will give next."""
    generator = torch.Generator()
    generator.set_state(torch.default_generator.get_state())
    return torch.randint(0, _WORD, (2,), generator=generator, device="cpu")


def are_active() -> bool:
    """Whether a mapped function with streams is running."""
    return active_streams() is not None


def active_streams() -> Streams | None:
    """The streams of the mapped function that is running, if there are any."""
    modes = function_modes()
    return next((mode for mode in reversed(modes) if isinstance(mode, Streams)), None)


class Streams(TorchFunctionMode):
    """Answers torch's random functions from keys."""

    def __init__(self, key: torch.Tensor, row: torch.Tensor | None, randomness: str) -> None:
        """``row``: index of the row along the mapped axis, None where a vmap around gives it."""
        super().__init__()
        self._key = key
        self._row = row
        self._randomness = randomness
        self.inside: list[tuple[torch.Tensor, str]] = []
        """Index and randomness of the inner mapped axes, which share the devices with this one."""
        self.draws = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        return func(*args, **kwargs) if answer is None else answer(self, func, *args, **kwargs)

    @contextmanager
    def again(self, draws: int) -> Iterator[None]:
        """Repeat in the block the numbers that came after the first ``draws`` draws."""
        self.draws, before = draws, self.draws
        try:
            with self:  # torch runs backward passes outside of all modes
                yield
        finally:
            self.draws = before

    def next_key(self, func: Any, generator: Any = None) -> torch.Tensor:
        name = getattr(func, "__name__", str(func))
        if self._randomness == "error":
            raise RuntimeError(
                f"pmap: the function draws random numbers ({name}), but randomness='error' was "
                "given. Draw them outside, use torchpmap.random with a key, or choose "
                "randomness='different' or 'same'."
            )
        if generator is not None:
            raise ValueError(
                f"{name} got a generator inside a mapped function; its state would be lost. Leave "
                "it out (torch.manual_seed sets the seed), or use torchpmap.random with a key."
            )
        row = self._row if self._randomness == "different" else None
        draw = torch.full_like(self._key[0], self.draws)
        # one hash for both: each is some hundred operations to compile
        key = torch.stack(
            threefry2x32(
                (self._key[0], self._key[1]), (draw, torch.zeros_like(draw) if row is None else row)
            )
        )
        self.draws += 1
        for index in self._rows_inside():
            key = fold_in(key, index)
        return key

    def _rows_inside(self) -> Iterator[torch.Tensor]:
        """The index along every inner axis whose rows draw different numbers."""
        for row, randomness in self.inside:
            if randomness == "error":
                raise RuntimeError(_ERROR_MODE)
            if randomness == "different":
                yield row
        yield from self.vmapped_rows()

    def vmapped_rows(self) -> Iterator[torch.Tensor]:
        """The index along every vmap inside the mapped function whose rows draw different
        numbers.
        """
        return _vmapped_rows([self._row, *(row for row, _ in self.inside)])


def batched_key(key: torch.Tensor, info: Any) -> tuple[torch.Tensor, bool]:
    """The key of a call under a vmap, and whether its last dim is the rows of that vmap."""
    if info.randomness == "error":
        raise RuntimeError(_ERROR_MODE)
    if info.randomness == "same":
        return key, False
    rows = torch.arange(info.batch_size)
    return torch.func.vmap(fold_in, (None, 0), -1)(key, rows), True


def _vmapped_rows(rows: list[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    """The index along every vmap inside the mapped function whose rows draw different numbers;
    ``rows``: indices along mapped axes, whose own vmaps do not count.
    """
    # the body of a loop may see another tensor in the place of an index, which ``view`` finds
    given = [row.view(row.shape) for row in rows if row is not None]
    own = {level_of(x) for row in given for x in layers(row) if is_vmap_wrapper(x)}
    device = None if rows[0] is None else rows[0].device
    for transform in transforms():
        if not is_vmap(transform) or transform.level() in own:
            continue
        size, randomness = size_and_randomness(transform)
        if randomness == "error":
            raise RuntimeError(_ERROR_MODE)
        if randomness == "different":
            index = innermost(torch.arange(size, device=device))
            yield add_batch_dim(index, 0, transform.level())


# -- answers ---------------------------------------------------------------------------------------


def _normal(key: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        parts = normal(key, (*shape, 2), dtype.to_real()) * 0.5**0.5
        return torch.view_as_complex(parts)
    return normal(key, shape, dtype)


def _uniform(key: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return uniform(key, shape, dtype)


def _finished(value: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Apply the options of torch's factory functions that do not affect the numbers."""
    if options.get("device") is not None:
        value = value.to(options["device"])
    if options.get("out") is not None:
        return options["out"].copy_(value)
    return value.requires_grad_() if options.get("requires_grad") else value


def _factory(sample: _Sample) -> Callable[..., torch.Tensor]:
    def answer(streams: Streams, func: Any, *size: Any, **options: Any) -> torch.Tensor:
        if "size" in options:
            size = (options.pop("size"),)
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        dtype = options.pop("dtype", None) or torch.get_default_dtype()
        key = streams.next_key(func, options.pop("generator", None))
        return _finished(sample(key, tuple(shape), dtype), options)

    return answer


def _like(sample: _Sample) -> Callable[..., torch.Tensor]:
    def answer(streams: Streams, func: Any, input: torch.Tensor, **options: Any) -> torch.Tensor:
        dtype = options.pop("dtype", None) or input.dtype
        key = streams.next_key(func, options.pop("generator", None))
        return _finished(sample(key, tuple(input.shape), dtype), options)

    return answer


def _integers(key: torch.Tensor, shape: Any, dtype: torch.dtype, low: int, high: int) -> Any:
    drawn = randint(key, shape, low, high, torch.int64)
    return drawn.to(dtype)


def _randint(streams: Streams, func: Any, *args: Any, **options: Any) -> torch.Tensor:
    both = len(args) + ("size" in options) > 2 or "low" in options
    given = dict(zip(("low", "high", "size") if both else ("high", "size"), args, strict=False))
    given |= {name: options.pop(name) for name in ("low", "high", "size") if name in options}
    dtype = options.pop("dtype", None) or torch.int64
    key = streams.next_key(func, options.pop("generator", None))
    size = tuple(given["size"])
    return _finished(_integers(key, size, dtype, given.get("low", 0), given["high"]), options)


def _randint_like(
    streams: Streams, func: Any, input: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor:
    bounds = [*args, *(options.pop(name) for name in ("low", "high") if name in options)]
    low, high = bounds if len(bounds) == 2 else (0, bounds[0])
    dtype = options.pop("dtype", None) or input.dtype
    key = streams.next_key(func)
    return _finished(_integers(key, tuple(input.shape), dtype, low, high), options)


def _randperm(streams: Streams, func: Any, n: int, **options: Any) -> torch.Tensor:
    dtype = options.pop("dtype", None) or torch.int64
    key = streams.next_key(func, options.pop("generator", None))
    return _finished(permutation(key, n).to(dtype), options)


def _torch_normal(
    streams: Streams, func: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **options: Any
) -> torch.Tensor:
    parts = [x.detach() for x in (mean, std) if isinstance(x, torch.Tensor)]
    mean, std = (x.detach() if isinstance(x, torch.Tensor) else x for x in (mean, std))
    if size is None:
        size = torch.broadcast_shapes(*(x.shape for x in parts))
    dtype = options.pop("dtype", None) or (parts[0].dtype if parts else torch.get_default_dtype())
    key = streams.next_key(func, options.pop("generator", None))
    return _finished(_normal(key, tuple(size), dtype) * std + mean, options)


def _torch_bernoulli(
    streams: Streams, func: Any, input: torch.Tensor, p: Any = None, **options: Any
) -> torch.Tensor:
    key = streams.next_key(func, options.pop("generator", None))
    chance = input.detach() if p is None else p
    return _finished(bernoulli(key, chance, tuple(input.shape)).to(input.dtype), options)


def _in_place(sample: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``sample(key, shape, dtype, *args)`` written to the tensor."""

    def answer(streams: Streams, func: Any, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        key = streams.next_key(func, options.pop("generator", None))
        with torch.no_grad():
            drawn = sample(key, tuple(x.shape), x.dtype, *args, **options)
        return x.copy_(drawn)

    return answer


def _random(key: Any, shape: Any, dtype: torch.dtype, low: Any = None, high: Any = None) -> Any:
    if low is None:
        # as torch: the integers that the dtype holds exactly
        largest = round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else None
        low, high = 0, torch.iinfo(dtype).max if largest is None else largest
    elif high is None:
        low, high = 0, low
    return _integers(key, shape, dtype, low, high)


def _chance(key: Any, shape: Any, dtype: torch.dtype, p: Any = 0.5) -> torch.Tensor:
    return bernoulli(key, p, shape).to(dtype)


def _between(key: Any, shape: Any, dtype: Any, a: Any = 0.0, b: Any = 1.0, **named: Any) -> Any:
    low, high = named.get("from", a), named.get("to", b)
    return uniform(key, shape, dtype) * (high - low) + low


def _dropout(shape_of: Callable[[torch.Tensor], tuple[int, ...]]) -> Callable[..., torch.Tensor]:
    def answer(
        streams: Streams,
        func: Any,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool | None = None,
    ) -> torch.Tensor:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not (training if train is None else train) or p == 0.0:
            return input
        keep = bernoulli(streams.next_key(func), 1.0 - p, shape_of(input))
        scale = keep.to(input.dtype) / (1.0 - p) if p < 1.0 else keep.to(input.dtype) * 0.0
        return input.mul_(scale) if inplace else input * scale

    return answer


def _whole(input: torch.Tensor) -> tuple[int, ...]:
    return tuple(input.shape)


def _channels(spatial: int) -> Callable[[torch.Tensor], tuple[int, ...]]:
    return lambda input: (*input.shape[: input.dim() - spatial], *(1,) * spatial)


_ANSWERS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.rand: _factory(_uniform),
    torch.randn: _factory(_normal),
    torch.rand_like: _like(_uniform),
    torch.randn_like: _like(_normal),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.normal: _torch_normal,
    torch.bernoulli: _torch_bernoulli,
    torch.Tensor.bernoulli: _torch_bernoulli,
    torch.Tensor.uniform_: _in_place(_between),
    torch.Tensor.normal_: _in_place(
        lambda key, shape, dtype, mean=0.0, std=1.0: _normal(key, shape, dtype) * std + mean
    ),
    torch.Tensor.bernoulli_: _in_place(_chance),
    torch.Tensor.exponential_: _in_place(
        lambda key, shape, dtype, lambd=1.0: exponential(key, shape, dtype) / lambd
    ),
    torch.Tensor.random_: _in_place(_random),
    torch.dropout: _dropout(_whole),
    F.dropout: _dropout(_whole),
    F.dropout1d: _dropout(_channels(1)),
    F.dropout2d: _dropout(_channels(2)),
    F.dropout3d: _dropout(_channels(3)),
}


@contextmanager
def streams(
    key: torch.Tensor, row: torch.Tensor | None, randomness: str
) -> Iterator[Streams | None]:
    """Answer from ``key`` in the block, unless a mapped function around it answers already."""
    if are_active():
        yield None
        return
    with Streams(key, row, randomness) as active:
        yield active


@contextmanager
def within(row: torch.Tensor, randomness: str) -> Iterator[None]:
    """In the block, numbers depend on the index along one more mapped axis too."""
    active = active_streams()
    assert active is not None
    active.inside.append((row, randomness))
    try:
        yield
    finally:
        active.inside.pop()


@contextmanager
def repeated(active: Streams, draws: int, step: torch.Tensor | None) -> Iterator[None]:
    """In the block, the numbers that come after the first ``draws`` draws, and depend on ``step``
    of a loop too.
    """
    before, active.draws = active.draws, draws
    if step is not None:
        active.inside.append((step, "different"))
    try:
        with active:  # again: modes that were entered since then must see the keys
            yield
    finally:
        active.draws = max(before, active.draws)
        if step is not None:
            active.inside.pop()
