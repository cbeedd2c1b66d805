"""Settings: the value assigned to ``tp.config``, else that of ``TORCHPMAP_*``, else the default.

An assignment is checked at once, and applies as docs/index.md says.  Variables are read when the
devices start, where a bad one is reported by name.  A new setting is a field of ``Config``, a line
in its docstring, and a name with its type in ``Settings``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torchpmap._base.devices import PLATFORMS

MAX_DEVICES = 256
PATIENCE_S = 1800.0
"""How long processes wait for each other if no timeout is set."""
_LONGEST_S = 1e9
"""A timeout that all clocks and locks of Python accept."""


def _check_num_devices(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_DEVICES:
        raise ValueError(f"{name} must be an int from 1 to {MAX_DEVICES}, but got {value!r}.")
    return value


def check_timeout(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= _LONGEST_S:
        raise ValueError(
            f"{name} must be a number of seconds above 0 (at most 1e9), but got {value!r}."
        )
    return float(value)


def _check_flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        legal = "0 or 1" if name.isupper() else "True or False"
        raise ValueError(f"{name} must be {legal}, but got {value!r}.")
    return value


def _setting(default: Any, check: Callable[[str, Any], Any], read: Callable[[str], Any]) -> Any:
    """A field. ``check`` gets what to call it in an error, and a value; ``read`` turns the text of
    its variable into a value.  Text that cannot be read goes to ``check`` as it is.
    """
    return field(default=default, metadata={"check": check, "read": read})


def _flag(default: bool) -> Any:
    return _setting(default, _check_flag, {"0": False, "1": True}.__getitem__)


def _choice(default: str | None, values: Collection[str], legal: str) -> Any:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise ValueError(f"{name} must be {legal}, but got {value!r}.")
        return str(value)

    return _setting(default, check, str)


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
        gathers: what follows when an operation on sharded tensors gathers its operands, an argument
            is moved, or a function of ``jit`` is traced whose operands must be resharded:
            ``"allow"``, ``"warn"`` or ``"raise"``.
        debug_nans: whether a call of a mapped or jitted function waits for its results and raises
            ``FloatingPointError`` if one holds a NaN, with what ``torchpmap.debug.find_nan`` finds.
        debug_infs: the same for infinity.
    """

    num_devices: int | None = _setting(None, _check_num_devices, int)
    device_type: str | None = _choice(None, PLATFORMS, " or ".join(map(repr, PLATFORMS)))
    warm: bool = _flag(True)
    timeout: float | None = _setting(None, check_timeout, float)
    shared_memory: bool = _flag(True)
    runtime: str = _choice(
        "auto", ("auto", "local", "torchrun", "inline"), "'auto', 'local', 'torchrun' or 'inline'"
    )
    check_captured: bool = _flag(True)
    log_compiles: bool = _flag(False)
    progress: bool = _flag(True)
    traceback: str = _choice("folded", ("folded", "full"), "'folded' or 'full'")
    gathers: str = _choice("allow", ("allow", "warn", "raise"), "'allow', 'warn' or 'raise'")
    debug_nans: bool = _flag(False)
    debug_infs: bool = _flag(False)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or each.default is not None:
                object.__setattr__(self, each.name, each.metadata["check"](each.name, value))

    @property
    def patience(self) -> float:
        """How many seconds processes wait for each other."""
        return PATIENCE_S if self.timeout is None else self.timeout

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **settings: Any) -> Config:
        """Read the environment; keyword arguments win over it."""
        for each in fields(cls):
            variable = f"TORCHPMAP_{each.name.upper()}"
            value: Any = environ.get(variable, "").strip()
            if value and each.name not in settings:
                with contextlib.suppress(ValueError, KeyError):
                    value = each.metadata["read"](value)
                settings[each.name] = each.metadata["check"](variable, value)
        return cls(**settings)


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
    debug_nans: bool
    debug_infs: bool

    def __init__(self) -> None:
        self.__dict__.update(_set={}, _listeners=[])

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
        # a thread that asks meanwhile keeps its answer in the dict of before
        object.__setattr__(self, "__dict__", {"_set": self._set, "_listeners": self._listeners})
        for _, after in self._listeners:
            after()

    def __getattr__(self, name: str) -> Any:
        if name not in _DERIVED:
            _refuse_unknown(name)
            raise AttributeError(name)
        kept = self.__dict__
        kept[name] = found = _DERIVED[name](self.snapshot())
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse_unknown(name)
        value = getattr(Config(**{name: value}), name)
        for before, _ in self._listeners:
            before(name, value)
        self._set[name] = value
        self._changed()

    def __dir__(self) -> list[str]:
        return [*_NAMES, "reset", "snapshot"]

    def __repr__(self) -> str:
        return f"<torchpmap settings: {self.snapshot()}>"


_NAMES = [each.name for each in fields(Config)]
_DERIVED: dict[str, Callable[[Config], Any]] = {
    "is_inline": lambda config: config.runtime == "inline",
    "sought": lambda config: ("NaN",) * config.debug_nans + ("infinity",) * config.debug_infs,
}
"""What every call asks, and is kept from one change to the next: whether ``runtime`` is
``"inline"``, and what results must not hold.
"""


def _now(name: str) -> property:
    return property(lambda settings: getattr(settings.snapshot(), name))


for _name in _NAMES:  # found without a look at an instance, as pytest's monkeypatch does
    setattr(Settings, _name, _now(_name))


def _refuse_unknown(name: str) -> None:
    if name not in _NAMES:
        known = ", ".join(_NAMES)
        raise AttributeError(f"torchpmap.config has no setting {name!r}; settings are {known}.")


config = Settings()
