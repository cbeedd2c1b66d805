"""The plans that the workers know: compiled by one, loaded by the others, dropped when they will
not be called again.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import TypeVar

from torchpmap._base.busy import waiting
from torchpmap._base.devices import Device
from torchpmap._runtime import wire
from torchpmap._runtime.groups.process_groups import RankPartition
from torchpmap._runtime.local.forkserver import server
from torchpmap._runtime.local.monitor import Pending
from torchpmap._runtime.local.pool import Pool
from torchpmap._trace import saved_code
from torchpmap._trace.compile import EAGER, CompileReport, Definition, has_users_operations
from torchpmap._trace.effects import prints
from torchpmap._trace.pickling import pickled

T = TypeVar("T")

_NO_WAIT = nullcontext()


class Plans:
    """Owner: the runtime.  What is not said to be otherwise is guarded by the pool's send lock."""

    def __init__(self, pool: Pool, devices: Sequence[Device]) -> None:
        self._pool = pool
        self._devices = devices
        self._loading: dict[int, tuple[str, Sequence[int]]] = {}
        """Of plans that ranks still load or compile: command -> name, and the ranks."""
        self._is_compiler_wanted = False
        self._is_compiler_due = False
        """Whether the workers were told to import it soon."""
        self.defined: dict[int, tuple[tuple[int, ...], bytes]] = {}
        """Ranks and definition by plan."""
        self.limited: dict[int, float] = {}
        """Timeout of each plan that has its own."""
        self._names: dict[int, str] = {}
        self._groups: dict[int, Collection[str]] = {}
        """The groups of each plan, also of those that are being defined."""
        self.retired: deque[int] = deque()
        """Plans to drop; finalizers in any thread append, ``forget`` removes."""

    def define(
        self,
        ranks: Sequence[int],
        definition: Definition,
        groups: dict[str, RankPartition],
    ) -> CompileReport:
        """As ``Runtime.define``."""
        body = pickled(definition)
        if prints(definition.graph):
            self._pool.prints = True
        if definition.backend != EAGER:
            self._pool.in_order(self._load_compiler)
        # torch's own operations, run as they are, need no compiler and cannot fail here
        is_sure = definition.backend == EAGER and not has_users_operations(definition.graph)
        leader, *others = ranks
        try:
            self._pool.in_order(self._claim, definition.plan_id, groups)
            if is_sure:
                report, others = CompileReport(0.0, "unused"), [*ranks]
            else:
                report = self._compile(leader, body, definition.name)
                if definition.backend.is_inductor:
                    saved_code.expect(report.is_saved)
                if definition.backend != EAGER and not report.is_saved:
                    server.expect_compiling()
        except BaseException:
            self._groups.pop(definition.plan_id, None)
            raise

        def send() -> None:
            self.forget()
            if report.is_saved:
                self._spare_compiler()
            self.defined[definition.plan_id] = tuple(ranks), body
            self._names[definition.plan_id] = definition.name
            if definition.timeout is not None:
                self.limited[definition.plan_id] = definition.timeout
            if others:
                self._pool.tell(others, wire.DEFINE, body)
                self._loading[self._pool.seq] = definition.name, others

        self._pool.in_order(send)
        return report

    def _claim(self, plan_id: int, groups: dict[str, RankPartition]) -> None:
        """Make groups, which stay as long as the plan does (send lock held)."""
        self._groups[plan_id] = groups
        self._pool.make_groups(groups)

    def limit_of(self, plan_id: int, default: float | None) -> tuple[float, str] | None:
        """Timeout and name of a plan, if its calls have a timeout."""
        limit = self.limited.get(plan_id, default)
        return None if limit is None else (limit, self._names[plan_id])

    @property
    def has_news(self) -> bool:
        """Whether there is something to ``tell``."""
        return bool(self.retired) or self._is_compiler_wanted

    def tell(self) -> None:
        """Send which plans are ``retired``, and that the compiler is wanted (send lock held)."""
        self.forget()
        if self._is_compiler_wanted:
            self._load_compiler()

    def expect_compiling(self) -> None:
        """As ``Runtime.expect_compiling``."""
        self._is_compiler_wanted = True
        self._pool.monitor.begin()

    def _load_compiler(self) -> None:
        """Let all workers that lack the compiler import it at the same time (send lock held)."""
        if not self._is_compiler_due:
            self._pool.tell(tuple(self._pool.workers), wire.LOAD, b"soon")
        self._is_compiler_wanted, self._is_compiler_due = False, True

    def _spare_compiler(self) -> None:
        """Let those that have not begun wait for a plan that needs it (send lock held)."""
        self._pool.tell(tuple(self._pool.workers), wire.LOAD, b"")
        self._is_compiler_wanted = self._is_compiler_due = False

    def _compile(self, leader: int, body: bytes, name: str) -> CompileReport:
        """Wait until the leader has compiled a plan, even if it dies once meanwhile."""
        incidents, deaths = self._pool.incidents, 0
        while True:
            sent: list[Pending] = []
            what = f"it compiles {name}"
            try:
                pending = self._pool.ask({leader: body}, wire.DEFINE, what=what, sent=sent)
                is_done = self._pool.answered(pending, (leader,))
            except BaseException:  # Ctrl-C
                for pending in sent:
                    self._pool.give_up(pending, (leader,), name)
                raise
            if is_done:
                return CompileReport(*pickle.loads(pending.replies[leader]))
            self._pool.repair()
            command = pending.era, pending.seq
            error = incidents.of_command(*command)
            if error is None and incidents.died_in(*command, leader):
                deaths += 1  # once may be a coincidence
                error = incidents.of_value(*command, (leader,)) if deaths > 1 else None
            if error is not None:
                raise error

    def waiting(self) -> AbstractContextManager[None]:
        """A block that waits for a value, and perhaps for what is loaded before."""
        return waiting(self._late) if self._loading and self._late() else _NO_WAIT

    def _late(self) -> str | None:
        for seq, (name, ranks) in sorted(self._loading.copy().items()):
            late = [self._devices[k] for k in ranks if not self._pool.has_reached(seq, (k,))]
            if late:
                return f"compiling `{name}` on {', '.join(map(str, late))}"
            self._loading.pop(seq, None)
        return None

    def forget(self) -> None:
        """Send which plans are ``retired``."""
        hand_over(self.retired, self._forget)

    def _forget(self, retired: Sequence[int]) -> None:
        dropped = [plan_id for plan_id in retired if plan_id in self.defined]
        if not dropped:
            return
        groups = self._used_by(dropped) - self._used_by(set(self._groups).difference(dropped))
        for name in groups:  # first: after Ctrl-C the workers may hold one that is not used
            self._pool.groups.pop(name, None)
        body = pickle.dumps((dropped, sorted(groups)))
        self._pool.tell(tuple(self._pool.workers), wire.FORGET, body)
        for plan_id in dropped:
            for table in (self.limited, self._names, self._groups, self.defined):
                table.pop(plan_id, None)

    def _used_by(self, plans: Collection[int]) -> set[str]:
        return {name for plan_id in plans for name in self._groups.get(plan_id, ())}

    def restore(self, new_ranks: Collection[int]) -> None:
        """Give new workers the plans of the old ones."""
        for ranks, body in self.defined.values():
            self._pool.tell([r for r in ranks if r in new_ranks], wire.DEFINE, body)


def hand_over(released: deque[T], send: Callable[[list[T]], None]) -> None:
    """Send what is in a deque, to which other threads may append meanwhile, and empty it.  After
    Ctrl-C some of it may be sent again.
    """
    taken: list[T] = []
    try:
        take(released, taken)
        if taken:
            send(taken)
    except BaseException:
        released.extend(taken)
        raise


def take(released: deque[T], taken: list[T]) -> None:
    """Move what is in a deque to a list: in one builtin, which Ctrl-C does not interrupt."""
    taken.extend(map(deque.popleft, repeat(released, len(released))))
