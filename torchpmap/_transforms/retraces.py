"""Notices that a function is traced again and again, and which argument keeps changing (pure)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

_WARN_AT = 16


class Retraces:
    """How often one function was traced in the pool it runs in, and with what."""

    def __init__(self) -> None:
        self.count = 0
        self._seen: dict[str, dict[Hashable, None]] = {}
        """Per argument path the kinds that were met, in order."""

    def clear(self) -> None:
        """Begin again: in a new pool every function has to be traced."""
        self.count = 0
        self._seen.clear()

    def note(self, kinds: Mapping[str, Hashable]) -> str | None:
        """Note a trace; returns a warning the first time that there are too many."""
        self.count += 1
        for path, kind in kinds.items():
            self._seen.setdefault(path, {})[kind] = None
        if self.count != _WARN_AT:
            return None
        path, met = max(self._seen.items(), key=lambda item: len(item[1]), default=("", {}))
        if len(met) < _WARN_AT // 4:
            return (
                f"traced {self.count} times, because what it closes over keeps changing (a global, "
                "an attribute or a closure that is rebound). Pass it as an argument."
            )
        examples = ", ".join(map(str, list(met)[-3:]))
        return (
            f"traced {self.count} times, because argument {path} keeps changing: the last were "
            f"{examples}. Every new shape, dtype or static value is traced and compiled anew: pad "
            "to a few sizes, or pass numbers as tensors."
        )
