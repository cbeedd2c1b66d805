"""Python code of this package that runs once on every device, and may tell something about it."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from torchpmap._base.devices import Device
from torchpmap._layout.axis_stack import group_name
from torchpmap._runtime.base import Handle, Team
from torchpmap._runtime.current import local_devices, runtime
from torchpmap._runtime.task import Rank, Report, Task, Work


def run_on(
    team: Team, name: str, work: Work, held: Sequence[Handle] = ()
) -> tuple[list[Report | None], list[Handle]]:
    """Run it on every rank of a team, and wait."""
    body = pickle.dumps(work)
    task = Task(name, secrets.randbits(56), body, team.ranks, group_name(team.ranks))
    return team.runtime.run_task(team, task, held)


@dataclass(frozen=True)
class Told:
    """What a device tells; it never leaves the host."""

    value: Any

    def as_data(self) -> NoReturn:
        raise NotImplementedError("only one device of a process takes part under a launcher")

    def like(self, data: list[Any], name: str) -> NoReturn:
        raise NotImplementedError("only one device of a process takes part under a launcher")


class Question(Protocol):
    """What is asked of a device; it is pickled."""

    def answer(self, rank: Rank) -> Any:
        """Called in the process of the device."""


@dataclass(frozen=True)
class _Asked:
    """A ``Work`` that only tells."""

    question: Question

    def run(
        self, rank: Rank, given: None, blocks: Sequence[torch.Tensor]
    ) -> tuple[Told, list[torch.Tensor]]:
        return Told(self.question.answer(rank)), []


def ask_devices(name: str, question: Question) -> dict[Device, Any]:
    """The answer of each device of this process, after everything that was called before.

    Raises what the question raised on a device, and what a call raises when a worker dies.
    """
    devices = local_devices()
    team = runtime().team(tuple(device.id for device in devices))
    told, _ = run_on(team, name, _Asked(question))
    return {
        device: each.value
        for device, each in zip(devices, told, strict=True)
        if isinstance(each, Told)
    }
