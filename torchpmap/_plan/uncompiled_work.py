"""What a rank does in an uncompiled call: run the function op by op, and report."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from torchpmap._base.ambient import Ambient, applied
from torchpmap._base.contents import Contents
from torchpmap._base.data import not_ours
from torchpmap._base.devices import PLATFORMS
from torchpmap._base.errors import lost_write
from torchpmap._base.pytree import Structure
from torchpmap._layout.axis_stack import Axis, Partition, recording, subgroup_name
from torchpmap._layout.grid import Cut, dim_of
from torchpmap._runtime.task import Rank
from torchpmap._trace.agreement import Agreement
from torchpmap._trace.program import Program
from torchpmap._trace.replication import of_first


@dataclass(frozen=True)
class Given:
    """What differs from call to call."""

    key: tuple[int, ...]
    """For random numbers."""
    ambient: Ambient
    """The settings of torch around the call."""


@dataclass(frozen=True)
class UncompiledReport:
    """What the controller learns of a rank's outputs."""

    structure: Structure | str  # the text of another process's structure, if it differs
    results: tuple[tuple[tuple[int, ...], torch.dtype, Cut] | None, ...]
    """Per leaf of the structure, its shape, dtype and cut; None for a None leaf."""
    differences: tuple[tuple[str, float], ...]
    """Leaf path and how far the value differs between devices (``check_replicated``)."""
    requires_grad: bool
    used_key: bool
    used_generator: bool
    """Whether torch's own generator was used."""
    written: str | None
    """The error for an in-place write to a tensor that is not an argument."""

    def as_data(self) -> list[Any]:
        # a class of the script is another class in every process, so structures are sent as text,
        # which no class of the user's writes
        return [str(self.structure), *(getattr(self, field.name) for field in fields(self)[1:])]

    def like(self, data: list[Any], name: str) -> UncompiledReport:
        if type(data) is not list or len(data) != len(fields(self)):
            raise not_ours(f"{data!r:.100} instead of a report of {name}")
        text, *others = data
        mine = self.structure
        return UncompiledReport(mine if text == str(mine) else text, *others)


@dataclass(frozen=True)
class UncompiledWork:
    """A program, and the tensors that it closes over."""

    program: Program
    captured: Sequence[torch.Tensor]

    def run(
        self, rank: Rank, given: Given, blocks: Sequence[torch.Tensor]
    ) -> tuple[UncompiledReport, list[torch.Tensor]]:
        index = rank.index
        key = torch.tensor(given.key, device=index.device)
        program = replace(self.program, seed=key)
        agree = Agreement(program.name, rank.ranks, rank.group).check

        @functools.cache
        def subgroup(partition: Partition) -> str:
            name = subgroup_name(rank.group, partition)
            agree(("groups", name))  # making groups waits for all devices
            rank.ensure_group(name, tuple(tuple(rank.ranks[k] for k in part) for part in partition))
            return name

        process_axis = Axis(program.names[0], len(rank.ranks), index, rank.group, subgroup)
        # the function may write to its arguments; the stored values stay
        own = [block.clone() for block in blocks]
        platform = PLATFORMS[index.device.type]
        platform.move(self.captured, index.device)
        generator = platform.random_state()
        before = [Contents(tensor) for tensor in self.captured]
        with (
            applied(given.ambient),
            nullcontext() if index.device.type == "cpu" else index.device,  # of factory functions
            recording(agree),
            torch.enable_grad(),
            torch.autograd.set_multithreading_enabled(False),  # axes are bound per thread
        ):
            outcome = program.run(own, process_axis)
            agree(("return",))
            axes = program.axes(process_axis)
            stored = outcome.change_blocks(lambda x, cut: _of_first_device(x, cut, axes)).blocks
        report = UncompiledReport(
            outcome.structure,
            tuple(
                None if block is None else (tuple(block.shape), block.dtype, cut)
                for block, cut in zip(stored, outcome.cuts, strict=True)
            ),
            tuple(zip(outcome.checked, map(float, outcome.checks), strict=True)),
            outcome.requires_grad,
            outcome.draws > 0,
            not torch.equal(generator, platform.random_state()),
            _written(self.captured, before),
        )
        return report, [
            block.detach().to(index.device).contiguous() for block in stored if block is not None
        ]


def _of_first_device(block: torch.Tensor, cut: Cut, axes: Sequence[Axis | None]) -> torch.Tensor:
    """The block; along every axis where it is declared replicated, that of the first device."""
    along = enumerate(axes)
    return of_first(block, [a for k, a in along if a is not None and dim_of(cut, k) is None])


def _written(captured: Sequence[torch.Tensor], before: Sequence[Contents]) -> str | None:
    pairs = zip(captured, before, strict=True)
    return next((lost_write(tensor) for tensor, held in pairs if not held.same()), None)
