"""``record`` and ``dump``: the last calls, kept on the devices and written when one goes wrong."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from torchpmap._base.ambient import SETTINGS
from torchpmap._base.boundary import boundary
from torchpmap._base.devices import threads_per_device
from torchpmap._base.errors import warn
from torchpmap._base.fingerprint import digest
from torchpmap._plan.plan import Plan
from torchpmap._runtime.current import process_count, process_index
from torchpmap._runtime.torchrun.joining import attempt
from torchpmap._trace import recording
from torchpmap.debug._graph_data import NotData, encoded, encoded_graph
from torchpmap.debug._record_file import Blocks, Facts, Lost, part_name, save

_MAX_NAME = 60


class Recording:
    """What ``record`` returns; a context manager.

    Attributes:
        folder: where files are written.
    """

    def __init__(self, folder: Path, last: int) -> None:
        self.folder = folder
        self._ring = recording.ring = recording.Ring(last)
        self._hook = sys.excepthook
        sys.excepthook = self._at_end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: Any, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._explain(error)
        finally:
            self.close()

    def close(self) -> None:
        """Record nothing any more; idempotent."""
        global _active
        if recording.ring is self._ring:
            recording.ring = _active = None
        if sys.excepthook == self._at_end:
            sys.excepthook = self._hook
        self._ring.runs.clear()

    def _at_end(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        """The script ends with an exception."""
        self._explain(error)
        self._hook(kind, error, traceback)

    def _explain(self, error: BaseException) -> None:
        """Write the calls, and say so at an error, which must not get lost by what fails here."""
        try:
            paths = self.write(f"{type(error).__name__}: {error}")
        except Exception as other:
            error.add_note(f"torchpmap.debug.record cannot write to {self.folder}: {other}")
            return
        if any(note.startswith("while tracing ") for note in getattr(error, "__notes__", ())):
            error.add_note("torchpmap.debug.record: this call has no graph yet to be recorded")
        if paths:
            count = "the last call is" if len(paths) == 1 else f"the last {len(paths)} calls are"
            error.add_note(f"{count} in {self.folder}: python -m torchpmap replay {paths[-1]}")

    def write(self, error: str = "") -> list[Path]:
        """Write the calls that are kept, the oldest first."""
        paths = [self._write(each, error) for each in tuple(self._ring.runs)]
        for name, how in tuple(self._ring.unrecorded.items()):
            told = f"{name} ran {how}: there is no graph that could be recorded."
            warn(f"torchpmap.debug.record: {told}")
        self._ring.unrecorded.clear()
        return [path for path in paths if path is not None]

    def _write(self, run: recording.Run, error: str) -> Path | None:
        plan: Plan = run.plan
        tensors: dict[str, torch.Tensor] = {}
        try:
            graph = encoded_graph(plan.definition.graph, tensors)
        except NotData as found:
            warn(f"torchpmap.debug.record: {plan.prefix} is not recorded: it has {found}.")
            return None
        name = re.sub(r"[^A-Za-z0-9]+", "-", plan.prefix)[:_MAX_NAME].strip("-")
        own = "" if run.ranks is None else f"-{digest(run.ranks).hex()[:8]}"  # numbered apart
        stem = f"{run.number:05d}-{name}{own}"
        path = self.folder / part_name(stem, process_index() if process_count() > 1 else None)
        facts = _facts(run.number, plan, error)
        save(path, facts, graph, tensors, *_blocks(plan, run.held))
        return path


_active: Recording | None = None


@boundary
def record(folder: str | os.PathLike[str], last: int = 3) -> Recording:
    """Keep the last calls of mapped and jitted functions, and write them when something goes wrong.

    A call is kept as what the devices run: the graph, and the values that it took, random keys and
    captured tensors among them.  They stay where they are, on the devices, also those that were
    donated or that the call replaced: ``last`` calls of a training step keep as many generations
    of the parameters.  Nothing is copied until a file is written.  Backward passes are calls of
    their own.

    Files are written when an exception leaves the ``with`` block, when one ends the script, and by
    ``dump()``.  They are data only: ``safetensors`` with one block of JSON.  ``replay`` runs them.
    Functions that run uncompiled (``compile=False``), under ``fake_pmap``, or with operations of
    your own have no graph, or none that is data; a warning says so.  A call that fails while it is
    traced has none yet; a note at its error says so.  Under a launcher each process writes its own
    part, and all must begin to record at the same call: parts belong together by their numbers.

    Args:
        folder: where the files go; it is made.
        last: how many calls.

    Returns:
        A context manager.  It records until its block ends, or until its ``close()`` or the next
        ``record``: there is one at a time.

    Raises:
        ValueError: ``last`` is less than 1.
        OSError: the folder cannot be made.

    Example:
        >>> import tempfile, torch, torchpmap as tp
        >>> f = tp.pmap(lambda x: tp.psum(x, "i"), axis_name="i")
        >>> with tempfile.TemporaryDirectory() as folder, tp.debug.record(folder):
        ...     _ = f(torch.arange(4.0))
        ...     [path] = tp.debug.dump()
        ...     tp.debug.replay(path).results["result"].tolist()
        [6.0, 6.0, 6.0, 6.0]
    """
    global _active
    if type(last) is not int or last < 1:
        raise ValueError(f"record: last must be a number of calls, 1 or more, but got {last!r}.")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if _active is not None:
        _active.close()
    _active = Recording(path, last)
    return _active


@boundary
def dump() -> list[Path]:
    """Write the calls that ``record`` keeps, now; the paths of the files, the oldest call first.

    It waits for the devices.  A block that was lost with a device is left out, and ``replay`` says
    which.

    Raises:
        RuntimeError: nothing is recorded.
        OSError: the files cannot be written.
    """
    if _active is None:
        raise RuntimeError("dump: nothing is recorded. Call torchpmap.debug.record(folder) before.")
    return _active.write()


def _facts(number: int, plan: Plan, error: str) -> Facts:
    definition, outputs = plan.definition, []
    paths = plan.structure.paths("result")
    names = plan.names or [name for k, name in enumerate(paths) if k not in plan.nones]
    for k, layout in enumerate(plan.outputs):
        slices = [
            [each.indices(size)[:2] for each, size in zip(index, layout.shape, strict=True)]
            for index in layout.slices
        ]
        name = names[k] if k < len(names) else f"output {k}"
        outputs.append(
            {"name": name, "shape": layout.shape, "ranks": layout.ranks, "slices": slices}
        )
    named = zip((each.name for each in SETTINGS), definition.ambient, strict=False)
    device = plan.team.runtime.devices[0].platform
    is_launched = process_count() > 1
    own, shared = torch.get_num_threads(), threads_per_device(len(plan.team.runtime.devices))
    return Facts(
        call=plan.prefix,
        number=number,
        ranks=list(definition.ranks),
        backend=definition.backend.name,
        device=device,
        num_threads=own if is_launched else shared,
        versions={
            "torchpmap": sys.modules["torchpmap"].__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        groups={name: [list(part) for part in parts] for name, parts in plan.groups.items()},
        uses_index=definition.uses_index,
        outputs=outputs,
        settings={name: encoded(value) for name, value in named},
        error=error,
        attempt=attempt(),
    )


def _blocks(plan: Plan, held: Sequence[Any]) -> tuple[Blocks, Lost]:
    found: Blocks = []
    lost: Lost = {}
    ranks = plan.definition.ranks
    mine = [process_index()] if process_count() > 1 else ranks
    for k, (handle, (shape, dtype)) in enumerate(zip(held, plan.definition.inputs, strict=True)):
        blocks: dict[int, torch.Tensor] = {}
        for rank in mine:
            block = torch.empty(shape, dtype=dtype, device="cpu")
            try:
                team = handle.team  # under a launcher that of a replicated value: this process
                place = team.ranks.index(rank) if rank in team.ranks else 0
                team.runtime.fetch(handle, [(place, -1, 0, block)])
            except Exception as error:
                lost[f"input {k} on rank {rank}"] = f"{type(error).__name__}: {error}"
            else:
                blocks[rank] = block
        found.append(blocks)
    return found, lost
