"""What this process has done with values that several processes hold, as one number per axis.

Every device of such a value computes its own block, and no device asks the others.  A process that
multiplies by another number, or leaves an operation out, would have another value from then on, and
nothing would fail.  So every process folds each operation into a number.  Collectives, and whatever
else the processes exchange, carry this number along, and a difference is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torchpmap._base.errors import CollectiveMismatch
from torchpmap._runtime.torchrun.rendezvous import Rendezvous, texts_by_rank

_PRIME, _BITS = 0x100000001B3, (1 << 62) - 1
_KEPT = 64
"""How many operations messages can show, at most."""

_Noted = tuple[str, Sequence[tuple[Any, int]]]


class History:
    """One per process; for the thread that makes calls."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._digests = rendezvous.histories
        self._latest: dict[tuple[int, ...], list[_Noted]] = {}
        self._begin: dict[tuple[int, ...], int] = {}
        """Which operation is the first of ``_latest``."""
        self._rendezvous = rendezvous
        rendezvous.refuse_history = self.refuse

    def of(self, axis: tuple[int, ...]) -> int:
        """The number of an axis: of all operations on values that its ranks hold."""
        return self._digests.get(axis, 0)

    def note(
        self, axis: tuple[int, ...], number: int, name: str, numbers: Sequence[tuple[Any, int]]
    ) -> None:
        """An operation follows; ``numbers``: those that it is given, each with a digest."""
        digest = self._digests.get(axis, 0) * _PRIME ^ number
        for _, each in numbers:
            digest = digest * _PRIME ^ each
        self._digests[axis] = digest & _BITS
        latest = self._latest.setdefault(axis, [])
        latest.append((name, numbers))
        if len(latest) == _KEPT:  # by halves: processes with other numbers of operations align
            del latest[: _KEPT // 2]
            self._begin[axis] = self._begin.get(axis, 1) + _KEPT // 2

    def refuse(self, axis: tuple[int, ...], ranks: Sequence[int]) -> NoReturn:
        """Raise, on all of ``ranks``, as their histories of ``axis`` differ."""
        begin = self._begin.get(axis, 1)
        lines = [_shown(begin + k, *each) for k, each in enumerate(self._latest.get(axis, ()))]
        title = "operations on values that span processes"
        data = "\n".join([title, *lines]).encode()
        given = self._rendezvous.exchange(
            ranks, data, f"comparing {title}", compares_histories=False
        )
        texts = [theirs.decode(errors="replace") for theirs in given]
        raise CollectiveMismatch(
            "the processes have done different things with values that all of them hold, which "
            f"differ now:\n{texts_by_rank(ranks, texts)}\nAll processes must do the same "
            "operations on such values, with the same numbers, in the same order."
        )


def _shown(place: int, name: str, numbers: Sequence[tuple[Any, int]]) -> str:
    given = f" with {', '.join(repr(number) for number, _ in numbers)}" if numbers else ""
    return f"operation {place}: {name}{given}"
