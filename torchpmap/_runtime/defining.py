"""Makes the devices compile a plan, and says how long that took."""

from __future__ import annotations

import time

from torchpmap._base import log
from torchpmap._base.busy import waiting
from torchpmap._runtime.base import Team
from torchpmap._runtime.groups.process_groups import RankPartition
from torchpmap._trace.compile import Definition


def define(
    team: Team, definition: Definition, groups: dict[str, RankPartition], described: str
) -> None:
    """Compile a plan on a team; ``described``: what it computes, as logs name it."""
    begin = time.monotonic()
    device = team.runtime.devices[team.ranks[0]]
    with waiting(f"compiling {described} on {device}"):
        report = team.runtime.define(team, definition, groups)
    if log.is_heard():
        log.tell(
            "compiled %s on %s with %s in %.3f s (%.3f s in the worker, cache %s)",
            described,
            device,
            definition.backend.name,
            time.monotonic() - begin,
            report.seconds,
            report.cache,
        )
