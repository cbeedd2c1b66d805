"""Why a function is traced again: what differs from the most similar earlier trace.  And why it is
not traced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping

from torchpmap._base import log
from torchpmap._base.ambient import KEYED, keyed
from torchpmap._base.errors import TraceError, warn
from torchpmap._layout.layout import Layout
from torchpmap._trace.untraceable import Untraceable
from torchpmap._transforms.call import CallOptions

_WARN_AT = 16
_KEPT = 64
"""How many earlier traces are compared."""
_NAMED = 4
"""How many differences a reason names."""

Kinds = Mapping[str, Hashable]
"""What a trace depends on, by name: "argument x" -> "float32[4, 6]"."""


class Retraces:
    """The traces of one function in the pool it runs in."""

    def __init__(self) -> None:
        self.count = 0
        self._traces: deque[Kinds] = deque(maxlen=_KEPT)
        self.because = "what it closes over has changed"
        """Why it is traced again, if nothing else is different."""
        self._warned: set[str] = set()

    def clear(self) -> None:
        """Begin again: in a new pool every function has to be traced."""
        self.count = 0
        self._traces.clear()

    def tell(
        self,
        options: CallOptions,
        kinds: Kinds,
        places: Mapping[str, Layout],
        arguments: str = "",
        because: str = "",
    ) -> None:
        """Note a trace: say why it is made, and warn if there are too many.

        Args:
            places: where arguments lie.
            arguments: as logs name them.
            because: why, if that is known.
        """
        kinds = dict(kinds)
        for name, layout in places.items():
            devices = " ".join(map(str, layout.devices))
            kinds[f"the place of {name}"] = f"{layout.sharding.spec} on {devices}"
        kinds |= {f"torch's {s.name}": value for s, value in zip(KEYED, keyed(), strict=True)}
        if log.is_heard() and options.backend is not None:
            given, why = arguments and f" ({arguments})", because or self.why(kinds)
            log.tell("tracing `%s`%s: %s", options.name, given, why)
        complaint = self.note(kinds)
        if complaint is not None:
            warn(f"{options.prefix}: {complaint}")

    def untraced(self, options: CallOptions, verdict: Untraceable, how: str) -> None:
        """Warn once that a function which cannot be traced runs ``how``; raise if it must be."""
        if options.fullgraph:
            raise TraceError(
                f"{options.prefix}: fullgraph=True, but the function cannot be traced: at "
                f"{verdict}, or drop fullgraph to run it {how}."
            ) from verdict.__cause__
        text = (
            f"{options.prefix}: running {how}, which is slower, because of {verdict} to compile "
            "it, or pass compile=False to silence this warning."
        )
        if text not in self._warned:
            self._warned.add(text)
            warn(text)

    def why(self, kinds: Kinds) -> str:
        """Why a function is to be traced with ``kinds``: what the nearest earlier trace had."""
        if not self._traces:
            return "first trace"
        latest_first = reversed(self._traces)
        differences = min((_differences(kinds, before) for before in latest_first), key=len)
        if not differences:
            return self.because
        more = f" and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
        return f"{'; '.join(differences[:_NAMED])}{more}"

    def note(self, kinds: Kinds) -> str | None:
        """Note a trace; returns a warning the first time that there are too many."""
        self.count += 1
        self._traces.append(kinds)
        if self.count != _WARN_AT:
            return None
        # in the order of the traces, because the last are shown
        met = {name: list(dict.fromkeys(_values(self._traces, name))) for name in kinds}
        name, values = max(met.items(), key=lambda item: len(item[1]), default=("", []))
        if len(values) < _WARN_AT // 4:
            return (
                f"traced {self.count} times, because what it closes over keeps changing (a global, "
                "an attribute or a closure that is rebound). Pass it as an argument."
            )
        examples = ", ".join(map(str, values[-3:]))
        return (
            f"traced {self.count} times, because {name} keeps changing: the last were {examples}. "
            "Every new shape, dtype or static value is traced and compiled anew: pad to a few "
            "sizes, or pass numbers as tensors."
        )


def _values(traces: deque[Kinds], name: str) -> list[Hashable]:
    return [kinds[name] for kinds in traces if name in kinds]


def _differences(now: Kinds, before: Kinds) -> list[str]:
    found = []
    for name in {**now, **before}:
        if name not in before:
            found.append(f"{name} is new")
        elif name not in now:
            found.append(f"{name} is gone")
        elif now[name] != before[name]:
            found.append(f"{name} is {now[name]}, and was {before[name]}")
    return found
