"""What one worker stores: handle -> tensor on its device (main thread of the worker)."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count, repeat

import torch

from torchpmap._base.errors import ShardLost
from torchpmap._base.platform import Platform
from torchpmap._runtime import wire
from torchpmap._runtime.local import staging
from torchpmap._runtime.local.staging import Staged
from torchpmap._runtime.task import Usage, bytes_held

FREED = 0
"""The handle of a value after its end."""


class Values:
    def __init__(
        self,
        platform: Platform,
        device: torch.device,
        where: str,
        staged: Staged,
        common: Staged,
        landed: Staged,
    ) -> None:
        """``staged``: where blocks come from, and ``common``, if other workers hold them too;
        ``landed``: where those that are fetched go.
        """
        self._platform = platform
        self._device = device
        self._where = where
        self._sources = staged, common
        self._landed = landed
        self._tensors: dict[int, torch.Tensor] = {}

    def of(self, handles: Iterable[int]) -> list[torch.Tensor]:
        try:
            return list(map(self._tensors.__getitem__, handles))
        except KeyError as error:  # this process is younger than the value, if that was not freed
            why = "it lived on a device whose worker died. Compute or load it again."
            if error.args == (FREED,):
                why = (
                    "Python had collected it, with a cycle of objects, before it ran the __del__ "
                    "that uses it. Make no cycle, or use the value before."
                )
            raise ShardLost(f"an argument is lost: {why}") from None

    def add(self, first: int, results: Sequence[torch.Tensor]) -> None:
        """Store results under consecutive handles."""
        self._tensors.update(zip(count(first), results, strict=False))

    def update(self, values: Mapping[int, torch.Tensor]) -> None:
        self._tensors.update(values)

    def release(self, handles: Iterable[int]) -> None:
        """Forget values; ``-first`` stands for all outputs of an uncompiled call, however many."""
        tensors = self._tensors
        deque(map(tensors.pop, handles, repeat(None)), maxlen=0)  # a loop in C: leaves are many
        for first in [-handle for handle in handles if handle < 0]:
            outputs = range(first, first + wire.TASK_OUTPUTS)
            for stored in [stored for stored in tensors if stored in outputs]:
                del tensors[stored]

    def usage(self) -> Usage:
        shared = sum(source.num_bytes() for source in self._sources)
        return Usage(bytes_held(self._tensors.values()), shared)

    def room(self, kind: int, seq: int, length: int, given: memoryview) -> memoryview:
        """Memory for the body of a large frame."""
        try:
            return memoryview(bytearray(length))
        except MemoryError:
            with suppress(wire.FrameError, struct.error):  # of a description that is not yet here
                if kind == wire.PUT:
                    dtype, shape, _ = wire.read_kind(given[wire.PUT_HEAD :])
                    raise wire.no_memory(self._where, shape, dtype) from None
            raise MemoryError(f"no memory {self._where}: {length} bytes") from None

    def put(self, body: memoryview) -> torch.Tensor:
        """Store what a frame PUT brings; returns its memory of the host, which the device may still
        be reading.
        """
        handle, offset, is_common = struct.unpack_from("<3q", body)
        if offset < 0:
            tensor = wire.read_tensor(body[wire.PUT_HEAD :])
        else:
            tensor = self._placed(self._sources[is_common], offset, body[wire.PUT_HEAD :])
        self._tensors[handle] = self._platform.upload(tensor, self._device)
        return tensor

    def _placed(self, source: Staged, offset: int, described: memoryview) -> torch.Tensor:
        """What lies in shared memory."""
        dtype, shape, _ = wire.read_kind(described)
        try:
            tensor = source.tensor(offset, shape, dtype)
        except OSError as error:
            raise wire.no_memory(self._where, shape, dtype) from error
        if not self._platform.is_asynchronous:  # else it is on the way until the device has read it
            source.hold(offset)
        return tensor

    def fetched(self, body: memoryview) -> torch.Tensor | None:
        """A stored tensor on the host, or one row of it; None if it is in shared memory now.

        The body of FETCH: handle, dim (-1: all of it), position, where in shared memory (offset of
        the region or -1, its room, first element), the dtype and shape that are expected, and the
        strides there.
        """
        handle, dim, position, offset, room, start, *expected = body.cast("q").tolist()
        ndim = expected[1]
        expected, strides = expected[: 2 + ndim], expected[2 + ndim :]
        (tensor,) = self.of([handle])
        if dim >= 0:
            tensor = tensor.select(dim, position)
        wire.refuse_other(tensor, expected, self._where)
        if offset >= 0:
            try:
                region = self._landed.region(offset, room)
            except OSError as error:
                shape = tuple(tensor.shape)
                raise wire.no_memory(self._where, shape, tensor.dtype) from error
            whole = region.tensor((room // tensor.itemsize,), tensor.dtype)
            target = whole.as_strided(tensor.shape, strides, start)
        elif self._platform.is_asynchronous:
            target = torch.empty(tensor.shape, dtype=tensor.dtype)
        else:
            return tensor.resolve_conj().resolve_neg().contiguous()
        if self._platform.is_asynchronous:
            self._platform.fetch(tensor, target)
        else:
            staging.copy(tensor, target)
        return target if offset < 0 else None
