"""Spans of what the controller does.

While a trace is taken, methods of this package are replaced by ones that are ranges in the record
too.  So calls cost nothing more when none is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torchpmap._base.replaced import Replaced, Replacement
from torchpmap._plan import lower
from torchpmap._plan.plan import defined
from torchpmap._runtime.base import Runtime
from torchpmap._transforms.mapped import Mapped
from torchpmap.profiler._record import Recorder

Label = Callable[..., str]


def watching(recorder: Recorder, runtime: Runtime | None) -> Replaced:
    """A block in which what the controller does is recorded; ``runtime``: None if there are no
    devices.
    """

    def timed(label: Label, **details: Any) -> Callable[[Any], Any]:
        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                with recorder.span(label(*args), **details):
                    return method(*args, **kwargs)

            return call

        return make

    def timed_execute(execute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(execute)
        def call(self: Any, team: Any, plan_id: int, *args: Any, **kwargs: Any) -> Any:
            name = f"running {self.plan_name(plan_id)}" if self.runs_here else "sending a call"
            with recorder.span(name, plan=defined.get(plan_id)) as span:
                handles = execute(self, team, plan_id, *args, **kwargs)
                span.seq = handles[0].seq if handles else 0
                return handles

        return call

    mapped = timed(lambda mapped, *_: f"call {mapped._options.name}")
    tracing = functools.partial(recorder.span, is_faked=True)
    found = [
        Replacement(Mapped, "_run_on_devices", mapped),
        Replacement(lower, "during", lambda _: lambda name: tracing(f"tracing {name}")),
    ]
    if runtime is not None:
        kind = type(runtime)
        found += [
            Replacement(kind, name, timed(label, is_faked=name == "define"))
            for name, label in _LABELS.items()
        ]
        found.append(Replacement(kind, "execute", timed_execute))
    return Replaced(found)


_LABELS: dict[str, Label] = {
    "define": lambda _, team, definition, *rest: f"compiling {definition.name}",
    "put": lambda *_: "sending a value",
    "fetch": lambda *_: "fetching a value",
    "block": lambda *_: "waiting",
    "run_task": lambda _, team, task, *rest: f"uncompiled {task.name}",
}
