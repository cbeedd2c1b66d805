"""Spans of what the controller does.

While a trace is taken, methods of this package are replaced by ones that are ranges in the record
too.  So calls cost nothing more when none is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchpmap._plan import lower
from torchpmap._plan.plan import defined
from torchpmap._runtime.base import Runtime
from torchpmap._transforms.mapped import Mapped
from torchpmap.profiler._record import Recorder

Label = Callable[..., str]


@contextmanager
def watching(recorder: Recorder, runtime: Runtime | None) -> Iterator[None]:
    """Record what the controller does in the block; ``runtime``: None if there are no devices."""
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, new: Any) -> None:
        replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    def time_method(owner: type, name: str, label: Label, **details: Any) -> None:
        method = vars(owner)[name]

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with recorder.span(label(*args), **details):
                return method(*args, **kwargs)

        replace(owner, name, timed)

    try:
        time_method(Mapped, "_run_on_devices", lambda mapped, *_: f"call {mapped._options.name}")
        replace(lower, "during", lambda name: recorder.span(f"tracing {name}", is_faked=True))
        if runtime is not None:
            kind = type(runtime)
            for name, label in _LABELS.items():
                time_method(kind, name, label, is_faked=name == "define")
            replace(kind, "execute", _timed_execute(recorder, vars(kind)["execute"]))
        yield
    finally:
        for owner, name, old in reversed(replaced):
            setattr(owner, name, old)


def _timed_execute(recorder: Recorder, execute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute)
    def timed(self: Any, team: Any, plan_id: int, *args: Any, **kwargs: Any) -> Any:
        name = f"running {self.plan_name(plan_id)}" if self.runs_here else "sending a call"
        with recorder.span(name, plan=defined.get(plan_id)) as span:
            handles = execute(self, team, plan_id, *args, **kwargs)
            span.seq = handles[0].seq if handles else 0
            return handles

    return timed


_LABELS: dict[str, Label] = {
    "define": lambda _, team, definition, *rest: f"compiling {definition.name}",
    "put": lambda *_: "sending a value",
    "fetch": lambda *_: "fetching a value",
    "block": lambda *_: "waiting",
    "run_task": lambda _, team, task, *rest: f"uncompiled {task.name}",
}
