"""Kinds of devices, and everything in which they differ.

No other module names a kind of device; each asks the ``Platform`` of its devices.  ``Platform``
itself is the CPU.  ``Accelerator`` is a device of ``torch.accelerator``; ``Cuda`` adds what that
interface lacks (ROCm has the same names).  A new kind is a subclass of a page and an entry in
``PLATFORMS`` (``_base/devices``).

The controller and the fork server use only the first group of methods, which initialise no device:
a process that has initialised CUDA cannot be forked.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from torchpmap._base.torch_groups import abort_nccl, make_nccl, was_forked_with

_MAX_CPU_DEVICES = 8
_BESIDE_BYTES = 1 << 18
"""A smaller copy is over before a stream of its own would have saved time."""

Boxed = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""Takes its inputs in a list, and empties it."""
Kinds = Sequence[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes."""


LATE_HINT = (
    "A kernel runs later than it is called: CUDA_LAUNCH_BLOCKING=1 shows the call that fails."
)
"""For the user, about an error after which a device cannot be used any more."""


class Event(Protocol):
    """A moment in the work of a device."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


def usable_cores() -> int:
    """Return how many CPU cores this process may run on."""
    return len(os.sched_getaffinity(0))


class Owned(NamedTuple):
    """The device of a process that has only one."""

    id: int
    """Its number among all devices."""
    number: int
    """Its number among those that the process sees."""


class Platform:
    """The CPU: an operation is complete when it returns."""

    name = "cpu"
    collectives = "GLOO"
    """The kind of back end that carries collectives between devices."""
    backends = "gloo"
    """The back ends of ``torch.distributed``, as ``init_process_group`` takes them."""
    is_asynchronous = False
    """Whether an operation may return before it is complete, and raise its error later."""
    is_hardware = False
    """Whether there are only so many devices, and one process needs one of its own."""
    bucket_bytes: int | None = None
    """How much of the sums over the devices goes in one message, which runs beside the computation
    (see ``_trace/buckets``); None: all sums of a collective go together, as nothing runs beside
    them.
    """
    variables: tuple[str, ...] = ()
    """Environment variables that list the visible devices; of those that are set the first counts.
    """
    is_default = True
    """Whether a host that has such devices uses them without being asked to."""
    owned: Owned | None = None
    """Set by ``open``; None in a process that has opened none."""

    # -- without initialising a device -------------------------------------------------------------

    def is_built(self) -> bool:
        """Whether this build of torch has such devices."""
        return True

    def count(self) -> int:
        """How many devices are used without a setting: here one per usable core, at most 8."""
        return min(usable_cores(), _MAX_CPU_DEVICES)

    def environment(self, rank: int) -> dict[str, str]:
        """Variables that show a new process only device ``rank``, as its device 0."""
        return {}

    def is_initialized(self) -> bool:
        """Whether this process, or the process that it was forked from, uses a device."""
        return False

    def device(self, number: int = 0) -> torch.device:
        """The device of tensors: 0 in a process that sees only its own."""
        return torch.device(self.name)

    def chosen(self) -> int | None:
        """The device that the script has made the current one; None if it has used none."""
        return None

    def narrow(self, number: int) -> int:
        """The number of a visible device, after what must be done to see it alone."""
        return number

    worker_settings: Mapping[str, str] = MappingProxyType({})
    """Environment variables of worker processes, unless the user has set them."""

    # -- in the process of a device ----------------------------------------------------------------

    def open(self, number: int, id: int) -> torch.device:
        """Make a visible device the current one of this process, which is to use no other; ``id``:
        its number among all devices.
        """
        self.owned = Owned(id, number)
        return self.device(number)

    def model(self, number: int) -> str:
        """The name of the hardware."""
        return self.name

    def hardware(self, number: int) -> str:
        """A text that no other hardware has, here or on another host; empty where processes may
        share it.
        """
        return ""

    def launch(
        self, run: Boxed, inputs: list[torch.Tensor], outputs: Kinds
    ) -> Sequence[torch.Tensor]:
        """Start ``run``; returns its results, of the kinds ``outputs``, which need not be computed
        yet.
        """
        return run(inputs)

    def upload(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor of the host on a device; the device may read the host's memory until the next
        ``record``.
        """
        return tensor

    def pin(self, address: int, num_bytes: int) -> None:
        """Let devices copy from memory of the host by themselves, if they can."""

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""

    def own_stream(self) -> AbstractContextManager[None]:
        """A block whose work is in one order with that of all such blocks, and after all that the
        caller has launched, on whatever stream.
        """
        return nullcontext()

    def place(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A contiguous copy of a value of the host or of a device, on ``device``; it need not be
        complete yet, but the value may change from now on.
        """
        return torch.empty(value.shape, dtype=value.dtype, device=device).copy_(value)

    def fetch(self, value: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a value that is complete to the host; waits for nothing else."""
        target.copy_(value)

    def record(self) -> Event:
        """The moment at which everything launched so far is complete."""
        return _Past()

    def synchronize(self) -> None:
        """Wait for everything launched so far; raises its errors."""

    def random_state(self) -> torch.Tensor:
        """The state of torch's generators that the current device uses."""
        return torch.default_generator.get_state()

    def move(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        """Move tensors of the host to a device of this kind, in place."""

    def recover(self, error: BaseException) -> bool:
        """Make the device usable after an error; False if this process cannot use it any more."""
        return True

    def communicator(self, store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        """The back end for tensors on the devices, beside Gloo for those of the host; None: Gloo
        carries both.
        """
        return None

    def through(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The group whose collectives run: ``group``, or one that calls it."""
        return group

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """End the collectives of ``groups`` that run on the devices (from any thread)."""

    def renew(self) -> None:
        """All work is over; from here on there are other groups."""


class _Past:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Accelerator(Platform):
    """A kind of device that ``torch.accelerator`` knows."""

    is_asynchronous = True
    is_hardware = True
    bucket_bytes = 25 * 2**20
    _copying: Any = None
    """The stream of large copies from the host."""

    def environment(self, rank: int) -> dict[str, str]:
        listed = self._listed()
        return {self._variable(): listed[rank] if listed else str(rank)}

    def _variable(self) -> str:
        return next((name for name in self.variables if os.environ.get(name)), self.variables[0])

    def _listed(self) -> list[str]:
        """The visible devices, as numbers or as names of hardware; empty: all."""
        visible = os.environ.get(self._variable())
        return [each.strip() for each in visible.split(",")] if visible else []

    def device(self, number: int = 0) -> torch.device:
        return torch.device(self.name, number)

    def chosen(self) -> int | None:
        used = torch.get_device_module(self.name).is_initialized()
        return torch.accelerator.current_device_index() if used else None

    def open(self, number: int, id: int) -> torch.device:
        torch.accelerator.set_device_index(number)
        return super().open(number, id)

    def model(self, number: int) -> str:
        return str(torch.get_device_module(self.name).get_device_name(number))

    def hardware(self, number: int) -> str:
        properties = torch.get_device_module(self.name).get_device_properties(number)
        return f"{self.name} {properties.uuid}"

    # the current device is one of each thread, so these name the device

    def upload(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        # of memory that is not pinned, torch would copy only after all work before it
        source = tensor if tensor.is_pinned() else tensor.pin_memory()
        if tensor.nbytes < _BESIDE_BYTES:
            return source.to(device, non_blocking=True)
        module = torch.get_device_module(self.name)
        self._copying = self._copying or module.Stream(self._number())
        current = module.current_stream(self._number())
        with module.stream(self._copying):  # beside the kernels that are launched already
            result = source.to(device, non_blocking=True)
        current.wait_stream(self._copying)
        result.record_stream(current)  # which may still use it when it is freed
        return result

    def place(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        if value.device.type == "cpu":
            pinned = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
            return self.upload(pinned.copy_(value), device)  # torch keeps it for the copy
        value.record_stream(torch.get_device_module(self.name).current_stream(self._number()))
        on_device = torch.empty(value.shape, dtype=value.dtype, device=device)
        return on_device.copy_(value, non_blocking=True)

    def fetch(self, value: torch.Tensor, target: torch.Tensor) -> None:
        module = torch.get_device_module(self.name)
        with module.stream(module.Stream(self._number())):  # else it would wait for later calls
            target.copy_(value)

    def record(self) -> Event:
        event = torch.Event(self.name)
        event.record(torch.accelerator.current_stream(self._number()))
        return event

    def _number(self) -> int:
        return 0 if self.owned is None else self.owned.number

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._number())

    def random_state(self) -> torch.Tensor:
        state = torch.get_device_module(self.name).get_rng_state(self._number())
        return torch.cat([torch.default_generator.get_state(), state])

    def move(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        for tensor in tensors:
            grad, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(device)
            tensor.grad = None if grad is None else grad.to(device)

    def recover(self, error: BaseException) -> bool:
        if issubclass(type(error), torch.OutOfMemoryError):  # a user's class may redefine __class__
            torch.accelerator.empty_cache()
        # an error of the device itself (an assert in a kernel, an illegal address) is raised by
        # every later use of it
        try:
            self.synchronize()
        except torch.AcceleratorError:
            return False
        return True


class Cuda(Accelerator):
    """NVIDIA's GPUs with NCCL, or AMD's with RCCL."""

    name = "cuda"
    collectives = "NCCL"
    backends = "cpu:gloo,cuda:nccl"
    variables = (
        ("CUDA_VISIBLE_DEVICES",)
        if torch.version.hip is None
        else ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    )

    def count(self) -> int:
        listed = self._listed()
        if _are_slices(listed):
            return len(listed)  # torch would ask the CUDA runtime, which shows only the first
        # torch counts through NVML, which initialises nothing; it asks the CUDA runtime only if
        # there is no NVML
        return torch.cuda.device_count()

    def is_built(self) -> bool:
        return torch.backends.cuda.is_built()

    def is_initialized(self) -> bool:
        return torch.cuda.is_initialized() or was_forked_with(self.name)

    def narrow(self, number: int) -> int:
        if not _are_slices(self._listed()):
            return number
        if not self.is_initialized():
            os.environ.update(self.environment(number))
        return 0

    def hardware(self, number: int) -> str:
        listed = self._listed()
        return listed[number] if _are_slices(listed) else super().hardware(number)

    # else NCCL's watchdog would end a process that reports an error of its device, or that waits
    # for one that died: in workers the controller decides
    worker_settings = MappingProxyType(
        {
            f"TORCH_NCCL_{name}": "0"
            for name in (
                *("RETHROW_CUDA_ERRORS", "ASYNC_ERROR_HANDLING", "ENABLE_MONITORING"),
                *("DUMP_ON_TIMEOUT", "WAIT_TIMEOUT_DUMP_MILSEC"),
            )
        }
    )

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        caller = torch.cuda.current_stream(self._number())
        own = torch.cuda.default_stream(self._number())
        if caller == own:
            yield
            return
        own.wait_stream(caller)
        with torch.cuda.stream(own):
            yield

    def pin(self, address: int, num_bytes: int) -> None:
        if int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)) != 0:
            # copies are slower then; the error stays set, and the next kernel would raise it
            with contextlib.suppress(torch.AcceleratorError):
                torch.zeros(1, device=self.device())

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def record(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # else the thread that waits takes a whole core
        event.record(torch.cuda.current_stream(self._number()))
        return event

    def communicator(self, store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        nccl = make_nccl(dist.PrefixStore("nccl", store), rank, size, timeout)
        # connects now, where the wait can be limited: else the first call would
        nccl.eager_connect_single_device(self.device(self._number()))
        return nccl

    def abort(self, groups: Sequence[dist.ProcessGroup]) -> None:
        # at the same time: the abort of one may wait for the kernel of another
        # (pytorch/pytorch#119797)
        threads = [
            threading.Thread(target=self._abort_one, args=(group,), daemon=True) for group in groups
        ]
        for thread in threads:
            try:
                thread.start()
            except RuntimeError:  # Python ends, and all work has been waited for
                thread.run()
        for thread in threads:
            if thread.ident is not None:
                thread.join()

    def _abort_one(self, group: dist.ProcessGroup) -> None:
        with contextlib.suppress(RuntimeError):  # a device that cannot be used any more
            abort_nccl(group, self.device())


def _are_slices(listed: Sequence[str]) -> bool:
    """Whether these are parts of GPUs (MIG), of which a process can use one."""
    return bool(listed) and listed[0].startswith("MIG-")


class Xpu(Accelerator):
    """Intel's GPUs with XCCL.  (It has never been run on one.)

    XCCL cannot abort a collective: a process that waits in one for a dead one has to be ended.
    """

    name = "xpu"
    collectives = "XCCL"
    backends = "cpu:gloo,xpu:xccl"
    is_default = False
    variables = ("ZE_AFFINITY_MASK",)

    def count(self) -> int:
        return torch.xpu.device_count()

    def is_built(self) -> bool:
        return dist.is_xccl_available()

    def is_initialized(self) -> bool:
        return torch.xpu.is_initialized() or was_forked_with(self.name)

    def communicator(self, store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        options = dist.ProcessGroupXCCL.Options()
        return dist.ProcessGroupXCCL(dist.PrefixStore("xccl", store), rank, size, options)
