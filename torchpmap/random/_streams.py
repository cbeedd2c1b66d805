"""Random numbers inside a mapped function: ``torch.randn``, dropout and relatives, per axis index.

torch's generators are state, and every device would have its own.  So inside a mapped function
torch's random functions draw from explicit keys.  The caller's generator gives one key per call,
which gives a key for each draw and row::

    key of the call -- (number of the draw, row) -- fold_in(row of an inner pmap or vmap)

So the numbers of a row depend on ``torch.manual_seed``, on the row's index and on nothing else: not
on how many devices there are, how the rows lie on them, or whether the function is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from torchpmap._base.context import assigned
from torchpmap._base.pytree import map_tensors
from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._base.sources import users_line
from torchpmap._base.torch_internals import (
    OpOverload,
    OpOverloadPacket,
    batched_levels,
    function_modes,
    is_vmap,
    num_modes,
    outside_modes,
    outside_transforms,
    row_numbers,
    size_and_randomness,
    torch_function_off,
    transforms,
)
from torchpmap._base.wrapped import without_asking
from torchpmap.random._answers import ANSWERS, truncated
from torchpmap.random._keys import fold_in
from torchpmap.random._threefry import threefry2x32

_WORD = 2**32
# torch's own text
_ERROR_MODE = (
    "vmap: called random operation while in randomness error mode. Please either use the 'same' or "
    "'different' randomness flags on vmap or perform the randomness operation out of vmap"
)


def new_seed() -> torch.Tensor:
    """A stand-in for the key of a call while a function is traced."""
    # transforms would trace it, and mapped functions keep it; to Dynamo the two are alike
    with nullcontext() if is_dynamo_compiling() else outside_transforms():
        return torch.zeros(2, dtype=torch.int64, device="cpu")


def draw_key() -> torch.Tensor:
    """The key of a call, from torch's default generator."""
    if num_modes():  # a draw of ours is no part of a graph that torch traces
        with outside_modes():
            return torch.randint(0, _WORD, (2,), device="cpu")
    return torch.randint(0, _WORD, (2,), device="cpu")


def peek_key() -> torch.Tensor:
    """What ``draw_key`` will give next."""
    generator = torch.Generator()
    generator.set_state(torch.default_generator.get_state())
    with torch_function_off():  # streams around are not asked
        return torch.randint(0, _WORD, (2,), generator=generator, device="cpu")


def are_active() -> bool:
    """Whether a mapped function with streams is running."""
    return active_streams() is not None


def active_streams() -> Streams | None:
    """The streams of the mapped function that is running, if there are any."""
    modes = function_modes()
    return next((mode for mode in reversed(modes) if isinstance(mode, Streams)), None)


class Streams(TorchFunctionMode):
    """Answers torch's random functions from keys.

    What torch wraps in Python (``nn.init``, ``F.gumbel_softmax``, ``nn.MultiheadAttention``) runs
    with the mode on, so that the mode sees the functions that draw.
    """

    def __init__(self, key: torch.Tensor, row: torch.Tensor | None, randomness: str) -> None:
        """``row``: index of the row along the mapped axis, None where a vmap around gives it."""
        super().__init__()
        self._key = key
        self._row = row
        self._randomness = randomness
        self.inside: list[tuple[torch.Tensor, str]] = []
        """Index and randomness of the inner mapped axes, which share the devices with this one."""
        self.steps: list[torch.Tensor] = []
        """The numbers of the steps of the loops around.  They may differ along a vmap, which is
        none of the mapped axes.
        """
        self.draws = 0
        self._seeds: list[tuple[int, int]] = []
        """(number of the first draw that it holds for, seed)"""

    def seed(self, seed: int) -> None:
        """From now on, numbers depend on this seed and not on the key of the call."""
        if _body.get() is not None:
            raise NotImplementedError(
                f"at {users_line()}: torch.manual_seed in the body of a loop or branch "
                f"({_body.get()}) of a mapped function: a body is traced once, and each step has "
                "numbers of its own. Call it before the loop, or pass a key and draw with "
                "torchpmap.random."
            )
        self._seeds = [pair for pair in self._seeds if pair[0] < self.draws]  # a repeated part
        self._seeds.append((self.draws, seed))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _answer_to(func)
        if answer is not None:
            return answer(functools.partial(self.next_key, func), *args, **kwargs)
        body = without_asking(func, _NAMES) if set(types) <= {torch.Tensor} else None
        if body is not None:
            with self:
                if func is torch.nn.functional.gumbel_softmax:  # it writes to zeros_like(logits)
                    args, kwargs = map_tensors(_of_the_row, (args, kwargs))
                return body(*args, **kwargs)
        if _draws(func):
            raise NotImplementedError(no_stream(f"at {users_line()}", _name(func)))
        if isinstance(func, OpOverload):
            refuse_draw(func, args, kwargs)
        out = kwargs.get("out")
        if isinstance(out, torch.Tensor) and batched_levels(out):
            return _into(out, func(*args, **{**kwargs, "out": None}))
        if func is torch.Tensor.new and _is_size(args[1:]):
            func = torch.Tensor.new_empty
        result = func(*args, **kwargs)
        return self._own(result) if func in _EMPTY else result

    def _own(self, new: torch.Tensor) -> torch.Tensor:
        """Memory for every row instead of memory that rows share, which no row could write to."""
        rows = [row for row, randomness in self._rows() if randomness == "different"]
        apart = [row for row in rows if row is not None and batched_levels(row)]
        if not apart or new.requires_grad or not new.is_contiguous():
            return new
        like = functools.reduce(torch.add, apart)
        return like.new_empty(new.shape, dtype=new.dtype, device=new.device)

    def next_key(self, func: Any, generator: Any = None) -> torch.Tensor:
        if self._randomness == "error":
            raise RuntimeError(
                f"pmap: the function draws random numbers ({_name(func)}), but randomness='error' "
                "was given. Draw them outside, use torchpmap.random with a key, or choose "
                "randomness='different' or 'same'."
            )
        if generator is not None:
            raise ValueError(
                f"{_name(func)} got a generator inside a mapped function; its state would be lost. "
                "Leave it out (torch.manual_seed sets the seed), or use torchpmap.random with a "
                "key."
            )
        (_, own), *inside = self._rows()
        row = self._row if own == "different" else None
        high, low, draw = self._counter()
        # one hash for both: each is some hundred operations to compile
        key = torch.stack(
            threefry2x32((high, low), (draw, torch.zeros_like(draw) if row is None else row))
        )
        self.draws += 1
        for index in _different(inside):
            key = fold_in(key, index)
        return key

    def _counter(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Two words of a key, and the number of the next draw from it."""
        filled = functools.partial(torch.full_like, self._key[0])
        seeds = [pair for pair in self._seeds if pair[0] <= self.draws]
        if not seeds:
            return self._key[0], self._key[1], filled(self.draws)
        first, seed = seeds[-1]
        return filled(seed // _WORD % _WORD), filled(seed % _WORD), filled(self.draws - first)

    def _rows(self) -> Iterator[tuple[torch.Tensor | None, str]]:
        """Index and randomness of this axis, the inner ones, the loops, and the vmaps inside."""
        yield self._row, self._randomness
        yield from self.inside
        yield from ((step, "different") for step in self.steps)
        yield from _vmapped_rows([self._row, *(row for row, _ in self.inside), self._key])

    def vmapped_rows(self) -> Iterator[torch.Tensor]:
        """The index along every vmap inside the mapped function whose rows draw different
        numbers.
        """
        return _different(_vmapped_rows([self._row, *(row for row, _ in self.inside), self._key]))


def _of_the_row(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values, in memory that every row has for itself."""
    return tensor.new_empty(tensor.shape).copy_(tensor)


def _is_size(args: Sequence[Any]) -> bool:
    """Whether ``x.new(*args)`` gets a size, and no values."""
    return all(isinstance(x, int) for x in args) or isinstance(args[0], torch.Size)


def _into(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """``out=`` of a function, which torch refuses where every row has memory of its own."""
    if result.shape != out.shape or not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(
            f"at {users_line()}: out has shape {list(out.shape)} and dtype {out.dtype}, expected "
            f"{list(result.shape)} and a dtype that {result.dtype} can be cast to."
        )
    return out.copy_(result)


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _different(rows: Iterable[tuple[Any, str]]) -> Iterator[torch.Tensor]:
    """The indices along the axes whose rows draw different numbers."""
    for row, randomness in rows:
        if randomness == "error":
            raise RuntimeError(_ERROR_MODE)
        if randomness == "different":
            yield row


def batched_key(key: torch.Tensor, info: Any) -> tuple[torch.Tensor, bool]:
    """The key of a call under a vmap, and whether its last dim is the rows of that vmap."""
    if info.randomness == "error":
        raise RuntimeError(_ERROR_MODE)
    if info.randomness == "same":
        return key, False
    rows = torch.arange(info.batch_size)
    return torch.func.vmap(fold_in, (None, 0), -1)(key, rows), True


def _vmapped_rows(rows: list[torch.Tensor | None]) -> Iterator[tuple[torch.Tensor, str]]:
    """Index and randomness of every vmap inside the mapped function; ``rows``: indices along mapped
    axes and the key, whose own vmaps do not count.
    """
    # the body of a loop may see another tensor in the place of an index, which ``view`` finds
    given = [row.view(row.shape) for row in rows if row is not None]
    own = frozenset[int]().union(*map(batched_levels, given))
    device = None if rows[0] is None else rows[0].device
    for transform in transforms():
        if not is_vmap(transform) or transform.level() in own:
            continue
        yield row_numbers(transform, device), size_and_randomness(transform)[1]


# -- which functions draw --------------------------------------------------------------------------


def _answer_to(func: Any) -> Callable[..., Any] | None:
    if isinstance(func, OpOverload | OpOverloadPacket):
        return _answer_to_operation(func)
    return ANSWERS.get(func.__name__) if isinstance(func, _IN_CPP) else None


@functools.cache
def _answer_to_operation(operation: OpOverload | OpOverloadPacket) -> Callable[..., Any] | None:
    packet = operation.overloadpacket if isinstance(operation, OpOverload) else operation
    namespace, _, name = str(packet).partition(".")
    return ANSWERS.get(name) if namespace == "aten" else None


def _draws(func: Any) -> bool:
    """Whether a function of torch that is written in C++, and has no answer, draws numbers."""
    return isinstance(func, _IN_CPP) and _draws_by_name(func.__name__)


@functools.cache
def _draws_by_name(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if name in _RECURRENT or not isinstance(packet, OpOverloadPacket):
        return False
    return name in _UNTAGGED or any(is_drawing(getattr(packet, o)) for o in packet.overloads())


def is_drawing(operation: Any) -> bool:
    """Whether torch says that an operation draws from a random generator."""
    return torch.Tag.nondeterministic_seeded in operation.tags


def refuse_draw(operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a call of an operation draws from a random generator."""
    if not is_drawing(operation):
        return
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):  # attention and RNNs draw only for this
            given = args[position : position + 1] or [kwargs.get(argument.name, 0.0)]
            if given[0] == 0:
                return
    raise NotImplementedError(no_stream(f"at {users_line()}", str(operation)))


_IN_CPP = (type(torch.rand), type(torch.Tensor.normal_))
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""They draw for dropout, which ``_trace/transform_rules`` takes apart."""
_UNTAGGED = frozenset({"binomial"})


_NAMES = ANSWERS.keys() | _UNTAGGED
_EMPTY = frozenset({torch.empty, torch.Tensor.new_empty, torch.empty_like})


def _truncated(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What replaces the loop of ``nn.init.trunc_normal_``, which goes on until all values fit."""

    def drawn(x: torch.Tensor, *limits: float, generator: Any = None) -> torch.Tensor:
        active = active_streams()
        if active is None or x.is_meta:
            return own(x, *limits, generator=generator)
        key_of = functools.partial(active.next_key, torch.nn.init.trunc_normal_)
        with torch.no_grad():
            return cast(torch.Tensor, truncated(key_of, x, *limits, generator=generator))

    return drawn


_truncated_replaced = Replaced(
    [Replacement(torch.nn.init, "_no_grad_trunc_normal_", _truncated)],
)


def no_stream(prefix: str, drawn: str = "an operation in the function") -> str:
    """``prefix``: whose message it is; ``drawn``: what draws."""
    return (
        f"{prefix}: {drawn} draws random numbers from torch's generator, which would not be the "
        "rows' own. Use torch's samplers (rand, randn, randint, randperm, normal, bernoulli, "
        "multinomial, poisson, their *_like and in-place forms), nn.init, dropout, or "
        "torchpmap.random with a key."
    )


# -- blocks ----------------------------------------------------------------------------------------


@contextmanager
def streams(
    key: torch.Tensor, row: torch.Tensor | None, randomness: str
) -> Iterator[Streams | None]:
    """Answer from ``key`` in the block, unless a mapped function around it answers already."""
    if are_active():
        yield None
        return
    with _truncated_replaced, Streams(key, row, randomness) as active:
        yield active


@contextmanager
def streams_of(key: torch.Tensor) -> Iterator[None]:
    """Answer from ``key`` in the block, whatever is around it."""
    with _truncated_replaced, Streams(key, None, "different"):
        yield


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


def in_body(name: str) -> AbstractContextManager[None]:
    """The block runs the body of a loop or branch, of this name, which may set no seed."""
    return assigned(_body, name)


_body: ContextVar[str | None] = ContextVar("torchpmap_body", default=None)


@contextmanager
def repeated(active: Streams, draws: int, step: torch.Tensor | None = None) -> Iterator[None]:
    """In the block, the numbers that come after the first ``draws`` draws, and depend on ``step``
    of a loop too.
    """
    before, active.draws = active.draws, draws
    if step is not None:
        active.steps.append(step)
    try:
        # again: backward passes run outside of all modes, and modes that were entered since then
        # must see the keys
        with active:
            yield
    finally:
        active.draws = max(before, active.draws)
        if step is not None:
            active.steps.pop()
