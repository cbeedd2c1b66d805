"""Functions that seed torch's generators, inside mapped functions.

Random numbers are drawn there from keys, and not from a generator.  ``torch.manual_seed`` seeds the
streams of the rows; others would change nothing but the caller's generator, and are refused.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._base.sources import users_line
from torchpmap.random._streams import active_streams, are_active

_SETTING = ("seed", "set_rng_state", "fork_rng")
_CUDA = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all")


def _for_streams(own: Callable[[int], torch.Generator]) -> Callable[[int], torch.Generator]:
    @functools.wraps(own)
    def manual_seed(seed: int) -> torch.Generator:
        active = active_streams()
        if active is None:
            return own(seed)
        active.seed(int(seed))
        return torch.default_generator

    return manual_seed


def _refusing(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def seed(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # torch's own functions restore what they change
        if are_active() and not str(caller).startswith("torch."):
            raise _refusal(f"torch.{own.__name__}")
        return own(*args, **kwargs)

    return seed


def _refusal(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"at {users_line()}: {what} inside a mapped function: random numbers come from keys there, "
        "of which each call draws one from the caller's generator, so this has no effect on them. "
        "Call torch.manual_seed, inside or before the mapped function, or pass a key and draw with "
        "torchpmap.random (torchpmap.random.key(0))."
    )


@contextlib.contextmanager
def generator_kept() -> Iterator[None]:
    """Refuse a change of the caller's generator by the function that the block traces."""
    before, seed = torch.default_generator.get_state(), torch.default_generator.initial_seed()
    yield
    # another thread may draw meanwhile, such as one that loads batches, which changes no seed
    if torch.default_generator.initial_seed() != seed:
        torch.default_generator.set_state(before)
        raise _refusal("torch.default_generator was seeded")


def _found() -> list[Replacement]:
    places = [(module, name) for module in (torch, torch.random) for name in _SETTING]
    places += [(module, name) for module in (torch.cuda, torch.cuda.random) for name in _CUDA]
    refused = [Replacement(*place, _refusing) for place in places if hasattr(*place)]
    seeded = [Replacement(module, "manual_seed", _for_streams) for module in (torch, torch.random)]
    return [*refused, *seeded]


seeds_replaced = Replaced(_found())
