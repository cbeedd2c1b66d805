"""Settings: the value assigned to ``tp.config``, else that of ``TORCHPMAP_*``, else the default.

An assignment is checked at once, and applies at once (``timeout``: not to what already waits;
``check_captured``: when a tensor is next sent; ``log_compiles`` and ``progress``: at the next
trace; ``traceback``: when an exception is next raised; ``gathers``: at the next operation).  What
the devices read when they start (``num_devices``, ``device_type``, ``warm``, ``shared_memory``, and
``runtime`` but for "inline") cannot be assigned another value while they run.  Variables are read
when the devices start, where a bad one is reported by name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torchpmap._base.devices import PLATFORMS

MAX_DEVICES = 256
RUNTIMES = ("auto", "local", "torchrun", "inline")
TRACEBACKS = ("folded", "full")
GATHERS = ("allow", "warn", "raise")
PATIENCE_S = 1800.0
"""How long processes wait for each other if no timeout is set."""
_LONGEST_S = 1e9
"""A timeout that all clocks and locks of Python accept."""


@dataclass(frozen=True, slots=True)
class Config:
    """One consistent set of settings; None means "find out" (see ``_base/devices``).

    Args:
        num_devices: how many devices to use, 1 to 256.
        device_type: ``"cpu"`` or ``"cuda"``.
        warm: compile one dummy function in the fork server, so that the first compiled call of
            every worker is fast.
        timeout: how many seconds a call may take, if ``pmap`` gets no ``timeout``; None: no limit.
            It also limits how long several processes wait for each other (None: half an hour).
        shared_memory: whether processes of one host exchange data through shared memory; if not,
            or where that is impossible, CPU processes use Gloo, and large blocks come through the
            workers' sockets.
        runtime: ``"local"`` (one worker process per device), ``"torchrun"`` (this process is one of
            several that a launcher started, and owns one device) or ``"inline"`` (mapped functions
            run in the calling process, see ``torchpmap.debug.fake_pmap``); ``"auto"`` is
            ``"torchrun"`` in a process of a launcher, else ``"local"``.
        check_captured: whether every call compares the tensors that its function closes over with
            the values sent; if not, it notices only the writes that torch counts, and none through
            ``.data`` or ``.numpy()``.
        log_compiles: whether the logger ``"torchpmap"`` reports each trace and compilation as a
            warning, which Python prints by default; if not, it does so at the level ``DEBUG``.
        progress: whether a line on the terminal, or in the cell of a notebook, says what is traced
            or compiled when that takes more than 2 s.
        traceback: ``"folded"`` (tracebacks show the frames of the user's code only) or ``"full"``.
        gathers: what follows when an operation on sharded tensors fetches its operands, an argument
            is moved, or a function of ``jit`` is traced whose operands must be resharded:
            ``"allow"``, ``"warn"`` or ``"raise"``.
    """

    num_devices: int | None = None
    device_type: str | None = None
    warm: bool = True
    timeout: float | None = None
    shared_memory: bool = True
    runtime: str = "auto"
    check_captured: bool = True
    log_compiles: bool = False
    progress: bool = True
    traceback: str = "folded"
    gathers: str = "allow"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, _CHECKS[field.name](field.name, value))

    @property
    def patience(self) -> float:
        """How many seconds processes wait for each other."""
        return PATIENCE_S if self.timeout is None else self.timeout

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **settings: Any) -> Config:
        """Read the environment; keyword arguments win over it."""
        values = {}
        for field in fields(cls):
            variable = f"TORCHPMAP_{field.name.upper()}"
            if field.name in settings:
                values[field.name] = settings[field.name]
            elif text := environ.get(variable, "").strip():
                values[field.name] = _CHECKS[field.name](variable, _parsed(field.name, text))
        return cls(**values)


class Settings:
    """The type of ``tp.config``: assign to override the environment, ``reset()`` to go back.

    Example:
        >>> config = Settings()
        >>> config.num_devices = 4
        >>> config.num_devices
        4
        >>> config.num_devices = 0
        Traceback (most recent call last):
            ...
        ValueError: num_devices must be an int from 1 to 256, but got 0.
    """

    num_devices: int | None
    device_type: str | None
    warm: bool
    timeout: float | None
    shared_memory: bool
    runtime: str
    check_captured: bool
    log_compiles: bool
    progress: bool
    traceback: str
    gathers: str
    is_inline: bool
    """Whether ``runtime`` is ``"inline"``; every call asks, so it is cached until an assignment or
    ``reset``.
    """

    __slots__ = ("_listeners", "_set", "is_inline")

    def __init__(self) -> None:
        object.__setattr__(self, "_set", {})
        object.__setattr__(self, "_listeners", [])

    def listen(self, before: Callable[[str, Any], None], after: Callable[[], None]) -> None:
        """Have ``before`` called with the name and the value of every assignment, which it may
        refuse, and ``after`` after every change.
        """
        self._listeners.append((before, after))

    def snapshot(self) -> Config:
        """Return the settings that a runtime started now would use."""
        return Config.from_env(**self._set)

    def reset(self) -> None:
        """Forget every assignment."""
        self._set.clear()
        self._changed()

    def _changed(self) -> None:
        with contextlib.suppress(AttributeError):
            object.__delattr__(self, "is_inline")
        for _, after in self._listeners:
            after()

    def __getattr__(self, name: str) -> Any:
        if name == "is_inline":  # its slot is empty
            object.__setattr__(self, name, self.runtime == "inline")
            return self.is_inline
        if name not in _CHECKS:
            raise AttributeError(_unknown(name))
        return getattr(self.snapshot(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _CHECKS:
            raise AttributeError(_unknown(name))
        value = getattr(Config(**{name: value}), name)
        for before, _ in self._listeners:
            before(name, value)
        self._set[name] = value
        self._changed()

    def __dir__(self) -> list[str]:
        return [*_CHECKS, "reset", "snapshot"]

    def __repr__(self) -> str:
        return f"<torchpmap settings: {self.snapshot()}>"


def _unknown(name: str) -> str:
    return f"torchpmap.config has no setting {name!r}; settings are {', '.join(_CHECKS)}."


def _parsed(name: str, text: str) -> Any:
    """Turn the text of a variable into a value; return other text as it is, for the check."""
    try:
        match name:
            case "num_devices":
                return int(text)
            case "warm" | "shared_memory" | "check_captured" | "log_compiles" | "progress":
                return {"0": False, "1": True}[text]
            case "timeout":
                return float(text)
    except (ValueError, KeyError):
        pass
    return text


def _check_num_devices(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_DEVICES:
        raise ValueError(f"{name} must be an int from 1 to {MAX_DEVICES}, but got {value!r}.")
    return value


def _check_device_type(name: str, value: Any) -> str:
    if type(value) is not str or value not in PLATFORMS:
        legal = " or ".join(map(repr, PLATFORMS))
        raise ValueError(f"{name} must be {legal}, but got {value!r}.")
    return str(value)


def _check_flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        legal = "0 or 1" if name.isupper() else "True or False"
        raise ValueError(f"{name} must be {legal}, but got {value!r}.")
    return value


def check_timeout(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= _LONGEST_S:
        raise ValueError(
            f"{name} must be a number of seconds above 0 (at most 1e9), but got {value!r}."
        )
    return float(value)


def _check_runtime(name: str, value: Any) -> str:
    if value not in RUNTIMES:
        legal = "'auto', 'local', 'torchrun' or 'inline'"
        raise ValueError(f"{name} must be {legal}, but got {value!r}.")
    return str(value)


def _check_traceback(name: str, value: Any) -> str:
    if value not in TRACEBACKS:
        raise ValueError(f"{name} must be 'folded' or 'full', but got {value!r}.")
    return str(value)


def _check_gathers(name: str, value: Any) -> str:
    if value not in GATHERS:
        raise ValueError(f"{name} must be 'allow', 'warn' or 'raise', but got {value!r}.")
    return str(value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "num_devices": _check_num_devices,
    "device_type": _check_device_type,
    "warm": _check_flag,
    "timeout": check_timeout,
    "shared_memory": _check_flag,
    "runtime": _check_runtime,
    "check_captured": _check_flag,
    "log_compiles": _check_flag,
    "progress": _check_flag,
    "traceback": _check_traceback,
    "gathers": _check_gathers,
}

config = Settings()
