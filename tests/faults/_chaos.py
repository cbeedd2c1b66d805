"""Random programs, random faults at random moments, and the inline runtime as the oracle.

A round of ``Chaos`` picks all of them from one seeded generator: it builds a program of a few
stages, asks ``tp.debug.fake_pmap`` what is right, lets the fault happen, and looks.

* The call gives the right value, or raises what this fault may raise.
* Every value held from an earlier round is still right, or is known to be lost.
* The next call gives the right value.
* Each of these ends in time.
"""

import contextlib
import ctypes
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from _rig import EAGER, endless_loop, interrupted_after, raising, within
from _support import SCALE, known_pids, wait_for

import torchpmap as tp

Function = Callable[[torch.Tensor], torch.Tensor]
LIMIT_S = 20.0
"""Of every call of a round: the longest legal wait is that for a stopped process."""
SIZES = (1, 7, 1_000, 70_000, 500_000)
"""Elements of a row: within a frame, beyond one, and beyond what a socket takes at once."""
NUM_PROGRAMS = 12
REPEATED = 20
"""How often a call without a fault is made."""


# -- programs --------------------------------------------------------------------------------------


def _ring(x: torch.Tensor) -> torch.Tensor:
    n = tp.axis_size("i")
    return tp.ppermute(x, "i", [(k, (k + 1) % n) for k in range(n)])


STAGES: dict[str, Function] = {
    "sin": torch.sin,
    "affine": lambda x: x * 0.5 + 1,
    "softmax": lambda x: torch.softmax(x, 0),
    "roll": lambda x: x.roll(1),
    "psum": lambda x: tp.psum(x, "i") * 0.25,
    "pmean": lambda x: tp.pmean(x, "i"),
    "pmax": lambda x: tp.pmax(x, "i"),
    "all_gather": lambda x: tp.all_gather(x, "i").sum(0) * 0.25,
    "ring": _ring,
    "scatter": lambda x: tp.all_gather(
        tp.psum_scatter(x.expand(4, *x.shape) * 0.25, "i"), "i"
    ).mean(0),
    "groups": lambda x: tp.psum(x, "i", axis_index_groups=[[0, 2], [1, 3]]) * 0.5,
    "gradient": lambda x: tp.grad(lambda v: tp.psum(v * v, "i").mean())(x) * 0.1,
}


@dataclass(frozen=True)
class Program:
    """Stages one after the other; before one of them, or at the end, a rank may do ``fault``."""

    stages: tuple[str, ...]
    fault: Callable[[], object] | None = None
    place: int = 0
    victim: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for position, name in enumerate([*self.stages, None]):
            here = self.fault is not None and position == self.place
            if here and int(tp.axis_index("i")) == self.victim:
                self.fault()
            if name is not None:
                x = STAGES[name](x)
        return x


def oracle(stages: tuple[str, ...], x: torch.Tensor) -> torch.Tensor:
    with tp.debug.fake_pmap():
        return tp.pmap(Program(stages), "i")(x)


# -- faults inside of the function -----------------------------------------------------------------


class Planned(Exception):
    """The exception of a fault that raises."""


def _flood() -> None:
    for _ in range(64):
        os.write(1, b"x" * 65535 + b"\n")


@dataclass(frozen=True)
class Inside:
    """What a rank does in the middle of an uncompiled call, and what the call may raise."""

    do: Callable[[], object]
    raises: tuple[type[BaseException], ...]
    deadly: bool = False
    timeout: float | None = None


def _signal_myself(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


kill_myself, stop_myself = _signal_myself(signal.SIGKILL), _signal_myself(signal.SIGSTOP)
INSIDE = {
    "raise": Inside(raising(lambda: Planned("planned")), (Planned,)),
    "EOFError": Inside(raising(lambda: EOFError("planned")), (EOFError,)),
    "SystemExit": Inside(raising(lambda: SystemExit(3)), (tp.WorkerError,)),
    "words of Gloo": Inside(
        raising(lambda: RuntimeError("gloo: Connection closed by peer")), (RuntimeError,)
    ),
    "SIGKILL": Inside(kill_myself, (tp.WorkerDied,), deadly=True),
    "SIGSEGV": Inside(lambda: ctypes.string_at(0), (tp.WorkerDied,), deadly=True),
    "exit": Inside(lambda: os._exit(5), (tp.WorkerDied,), deadly=True),
    "fork": Inside(os.fork, ()),
    "flood": Inside(_flood, ()),
    "mismatch": Inside(lambda: tp.psum(torch.ones(1), "i"), (tp.CollectiveMismatch,)),
    "loop": Inside(endless_loop, (tp.CallTimeout,), timeout=0.5),
    "GIL": Inside(
        lambda: ctypes.PyDLL(None).sleep(1000), (tp.CallTimeout,), deadly=True, timeout=0.5
    ),
    "SIGSTOP": Inside(stop_myself, (tp.CallTimeout,), deadly=True, timeout=0.5),
    "SIGSTOP, no timeout": Inside(stop_myself, (tp.WorkerDied,), deadly=True),
}

# -- faults from outside ---------------------------------------------------------------------------

OUTSIDE = ("kill", "kill two", "kill again", "stop", "shutdown")
MOMENTS = ("idle", "calls queued", "while waiting", "while feeding", "while fetching")


def hit(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # a fault of the round before has ended it
        os.kill(pid, number)


@dataclass
class Held:
    """A value of an earlier round, and what it must be."""

    value: tp.ShardedTensor
    right: torch.Tensor


@dataclass
class Chaos:
    """Rounds of one seed, all on the present pool."""

    seed: int
    num_devices: int = 4
    held: list[Held] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    operations: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.torch_random = torch.Generator().manual_seed(self.seed)
        self.programs = [
            tuple(self.random.choices(list(STAGES), k=self.random.randint(1, 5)))
            for _ in range(NUM_PROGRAMS)
        ]
        self.compiled: dict[tuple[str, ...], Callable[..., Any]] = {}
        self.story = ""

    # -- parts of a round --------------------------------------------------------------------------

    def pick_program(self) -> tuple[str, ...]:
        return self.random.choice(self.programs)

    def pick_rows(self) -> torch.Tensor:
        size = self.random.choice(SIZES)
        return torch.rand(self.num_devices, size, generator=self.torch_random)

    def graph(self, stages: tuple[str, ...]) -> Callable[..., Any]:
        """The program as a compiled function, always the same one."""
        if stages not in self.compiled:
            self.compiled[stages] = tp.pmap(Program(stages), "i", compile=EAGER)
        return self.compiled[stages]

    def check(self, got: Any, right: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(
            got, right, rtol=1e-4, atol=1e-5, msg=lambda text: f"{self.story}: {what}: {text}"
        )

    def call(self, what: str, function: Callable[[], Any], seconds: float = LIMIT_S) -> Any:
        """(value, error) of a call that ends in time."""
        self.operations += 1
        outcome = within(seconds, function)
        return outcome.value, outcome.error

    # -- rounds ------------------------------------------------------------------------------------

    def good_round(self) -> None:
        """The same call several times, without a fault."""
        stages, x = self.pick_program(), self.pick_rows()
        uncompiled = self.random.random() < 0.3
        self.story = f"seed {self.seed}: {stages} of {list(x.shape)}"
        mapped = tp.pmap(Program(stages), "i", compile=False) if uncompiled else self.graph(stages)
        right = oracle(stages, x)

        def run() -> torch.Tensor:
            for _ in range(REPEATED):
                value = mapped(x)
            self.hold(value, right)
            return value.cpu()

        self.operations += REPEATED - 1

        value, error = self.call("good call", run)
        if error is not None:
            raise AssertionError(f"{self.story}: a good call raised") from error
        self.check(value, right, "a good call")

    def hold(self, value: tp.ShardedTensor, right: torch.Tensor) -> None:
        self.held.append(Held(value, right))
        if len(self.held) > 6:
            del self.held[self.random.randrange(len(self.held))]

    def faulty_round(self) -> None:
        """A fault, then the look around."""
        rounds = [self.inside, self.outside, self.interrupted]
        deadly = self.random.choices(rounds, [6, 3, 1])[0]()
        self.look_at_held(deadly)
        self.good_round()

    def inside(self) -> bool:
        name = self.random.choice(list(INSIDE))
        fault = INSIDE[name]
        stages, x = self.pick_program(), self.pick_rows()
        place = self.random.randint(0, len(stages))
        victim = self.random.randrange(self.num_devices)
        self.seen[name] += 1
        self.story = f"seed {self.seed}: {name} on {victim} at {place} of {stages}, {list(x.shape)}"
        program = Program(stages, fault.do, place, victim)
        mapped = tp.pmap(program, "i", compile=False, timeout=fault.timeout)
        right = oracle(stages, x)
        if fault.timeout is not None:
            # a first call imports for seconds, and an import is not interrupted
            self.call(
                "first call", tp.pmap(Program(stages), "i", compile=False)(x).block_until_ready
            )
        value, error = self.call("faulty call", lambda: mapped(x).cpu())
        if error is None:
            # a fault that is none for the result
            assert not fault.raises, f"{self.story}: no error, but {value}"
            self.check(value, right, "a call with a harmless fault")
        elif not isinstance(error, fault.raises):
            raise AssertionError(f"{self.story}: raised {error!r}") from error
        return fault.deadly

    def outside(self) -> bool:
        name, moment = self.random.choice(OUTSIDE), self.random.choice(MOMENTS)
        victim = self.random.randrange(self.num_devices)
        stages, x = self.pick_program(), self.pick_rows()
        delay = self.random.random() * 0.003
        self.seen[f"{name}, {moment}"] += 1
        self.story = f"seed {self.seed}: {name} on {victim} {moment}, {stages}, {list(x.shape)}"
        right, mapped = oracle(stages, x), self.graph(stages)
        value, error = self.call("first call", lambda: mapped(x).block_until_ready())
        if error is not None:
            raise AssertionError(f"{self.story}: before the fault") from error
        stored: tp.ShardedTensor = value
        uses = {
            "idle": lambda: None,
            "calls queued": lambda: [mapped(x) for _ in range(20)][-1].cpu(),
            "while waiting": lambda: [mapped(mapped(x)).block_until_ready(), None][1],
            "while feeding": lambda: mapped(x).cpu(),
            "while fetching": stored.cpu,
        }
        striker = threading.Timer(delay, self.strike, (name, victim))
        striker.start()
        value, error = self.call("call meanwhile", uses[moment])
        striker.join()
        if error is None and value is not None:
            self.check(value, right, "a call meanwhile")
        elif error is not None and not isinstance(
            error, tp.WorkerDied | tp.ShardLost | tp.RuntimeClosed | ValueError
        ):
            raise AssertionError(f"{self.story}: raised {error!r}") from error
        # what was known before the blow may be noticed only now
        self.call("notice", lambda: tp.pmap(lambda v: v, compile=EAGER)(x).cpu())
        tp.init(self.num_devices)
        return True

    def interrupted(self) -> bool:
        """Ctrl-C while calls are made."""
        stages, x = self.pick_program(), self.pick_rows()
        delay = self.random.random() * 0.005
        self.seen["Ctrl-C"] += 1
        self.story = f"seed {self.seed}: Ctrl-C after {delay} s of {stages}, {list(x.shape)}"
        mapped = self.graph(stages)
        mapped(x).block_until_ready()
        interrupted_after(delay, lambda: [mapped(x), mapped(x).cpu()])
        self.operations += 1
        return False

    def strike(self, name: str, victim: int) -> None:
        pids = known_pids()
        if name == "shutdown":
            tp.shutdown()
            return
        targets = [victim, (victim + 1) % self.num_devices] if name == "kill two" else [victim]
        for target in targets:
            pid = pids[target] if target < len(pids) else None
            if pid is not None:
                hit(pid, signal.SIGSTOP if name == "stop" else signal.SIGKILL)
        if name == "kill again":
            wait_for(lambda: known_pids()[victim] not in (None, pids[victim]), 1 / SCALE)
            pid = known_pids()[victim]
            if pid is not None:
                hit(pid, signal.SIGKILL)

    def look_at_held(self, deadly: bool) -> None:
        story = self.story
        for held in tuple(self.held):
            value, error = self.call("held value", held.value.cpu)
            if error is None:
                self.check(value, held.right, "a held value")
                continue
            allowed = (tp.ShardLost, tp.WorkerDied, tp.RuntimeClosed)
            if not deadly or not isinstance(error, allowed):
                raise AssertionError(f"{story}: a held value raised {error!r}") from error
            self.held.remove(held)
