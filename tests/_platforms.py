"""Devices that tests use in the place of others: ``TORCHPMAP_TEST_LAG=1`` and
``TORCHPMAP_TEST_SHARE=1`` (see ``conftest``; ``_base/devices`` imports them in every process).

``Lagging`` is a stand-in for an accelerator, on the CPU.  Calls run later, on a thread of their
own; until then their results are garbage.  Errors come when the thread reaches them.  A collective
that has lost a rank goes on until this process aborts it; then it raises nothing, and leaves
garbage.  An index out of range is what an assert in a kernel is: no device can be used after it.
"""

from __future__ import annotations

import ctypes
import queue
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from _through_host import ThroughHost

from torchpmap._base.errors import GroupLost
from torchpmap._base.platform import Boxed, Cuda, Event, Kinds, Platform

_MAX_DEVICES = 8


class _Moment:
    """An event of the thread."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.error: BaseException | None = None

    def reach(self, error: BaseException | None) -> None:
        self.error = error
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()
        if self.error is not None:
            raise self.error


class Lagging(Platform):
    is_asynchronous = True
    bucket_bytes = 2**20

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        """Of a call that no event has told of."""
        self._broken: BaseException | None = None
        """What every use of the device raises from now on."""
        self._pinned: set[int] = set()
        self._aborted = threading.Event()
        self._left: list[dist.ProcessGroup] = []
        """Groups that were aborted: the thread may be about to enter one, and C++ does not keep
        the half of it that is of Python.
        """

    def launch(
        self, run: Boxed, inputs: list[torch.Tensor], outputs: Kinds
    ) -> Sequence[torch.Tensor]:
        self._raise_if_broken()
        results = [_garbage(shape, dtype) for shape, dtype in outputs]

        def work() -> None:
            if self._broken is not None:
                return
            for result, value in zip(results, run(inputs), strict=True):
                result.copy_(value)

        self._add(work)
        return results

    def upload(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        # as CUDA does, reads pinned memory late without holding it
        address, size = tensor.data_ptr(), tensor.nbytes
        held = None if address in self._pinned else tensor
        copy = _garbage(tensor.shape, tensor.dtype)

        def work() -> None:
            ctypes.memmove(copy.data_ptr(), address, size)
            assert held is None or held.data_ptr() == address

        self._add(work)
        return copy

    def pin(self, address: int, num_bytes: int) -> None:
        self._pinned.add(address)

    def unpin(self, address: int) -> None:
        self._pinned.remove(address)

    def record(self) -> Event:
        moment = _Moment()

        def reach() -> None:
            error, self._error = self._error, None
            moment.reach(self._broken or error)

        self._add(reach)
        return moment

    def synchronize(self) -> None:
        self.record().synchronize()

    def recover(self, error: BaseException) -> bool:
        return self._broken is None

    def renew(self) -> None:
        self._aborted.clear()
        self._left.clear()

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._left += groups
        self._aborted.set()

    def close(self) -> None:
        """End the thread."""
        self._work.put(None)
        if self._thread is not None:
            self._thread.join()

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _add(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchpmap-lag", daemon=True)
            self._thread.start()
        self._work.put(work)

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        torch.set_num_threads(torch.get_num_threads())  # the number is one of each thread
        while (work := self._work.get()) is not None:
            try:
                work()
            except (GroupLost, dist.DistError):  # a rank is gone, or has aborted the group
                self._aborted.wait()
            except BaseException as error:
                if re.search("out of (range|bounds)", str(error)):
                    self._broken = error
                self._error = error


def _garbage(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    result = torch.empty(shape, dtype=dtype)
    if result.numel():
        result.view(-1).view(torch.uint8).fill_(0x7F)
    return result


class SharedCuda(Cuda):
    """The first GPU for every worker, for tests: ``TORCHPMAP_TEST_SHARE=1``.

    NCCL refuses two processes on one GPU.  Tensors travel through the host, and Gloo's collectives
    end when its sockets are shut down.
    """

    collectives = "GLOO"
    backends = "gloo"

    def count(self) -> int:
        return _MAX_DEVICES if super().count() else 0

    def environment(self, rank: int) -> dict[str, str]:
        return super().environment(0)

    def device(self, number: int = 0) -> torch.device:
        return super().device(0)

    def narrow(self, number: int) -> int:
        return super().narrow(0)

    def open(self, number: int, id: int) -> torch.device:
        return super().open(0, id)

    def model(self, number: int) -> str:
        return super().model(0)

    def hardware(self, number: int) -> str:
        return ""

    def communicator(self, store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        return None

    def through(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        return ThroughHost(group)

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        pass
