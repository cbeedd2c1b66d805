"""Compiled bodies of loops, repeated by C++.

Inductor's code of a body on the CPU is a function in Python: it makes tensors and calls kernels, C
functions that take the addresses of their memory.  To call it takes some 10 us.  If it does nothing
else, what it calls is noted once, for the first step, as a CUDA graph does it::

    buf0 = empty_strided_cpu(...)              kernel0: the carry, row 0 -> scratch
    cpp_fused_0(arg0, arg1, buf0)              kernel1: scratch, the weights -> the next carry
    buf1 = empty_strided_cpu(...)
    cpp_fused_1(buf0, arg2, buf1)

C++ then repeats the calls for every step, some 30 ns each, with addresses that move from row to
row.  The carry has two places: a step reads one and writes the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from torchpmap._base.fingerprint import as_bytes

Tensors = Sequence[torch.Tensor]

_MAX_BYTES = 4 << 20
"""Of the values inside a step.  A step with more takes so long that it does not matter how it is
called; and they all stay in memory.
"""
_MAX_ARGUMENTS = 64
_ALIGNMENT = 64

_KNOWN = {"clear", "torch", "empty_strided_cpu", "reinterpret_tensor"}
"""What code may use besides kernels and dtypes: ``args.clear()`` is the first."""

_SOURCE = """
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <utility>

template <size_t>
using address = void*;

template <size_t... I>
void call(void* function, void** a, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(address<I>...)>(function)(a[I]...);
}

template <size_t... N>
void call_any(void* function, void** a, int64_t count, std::index_sequence<N...>) {
  using Caller = void (*)(void*, void**);
  static const Caller callers[] = {
      [](void* f, void** a) { call(f, a, std::make_index_sequence<N>()); }...};
  callers[count](function, a);
}

// Runs steps from `first` on, for at most some 0.1 s, so that the caller can be interrupted.
// Returns the number of the step that is next, or -1 - (the number of the step that failed).
extern "C" int64_t repeat(int64_t first, int64_t steps, int64_t calls, void** functions,
                          const int64_t* counts, const int64_t* places, char** bases,
                          char* message, int64_t size) {
  using clock = std::chrono::steady_clock;
  const auto end = clock::now() + std::chrono::milliseconds(100);
  void* a[MAX_ARGUMENTS];
  for (int64_t step = first; step < steps; ++step) {
    const int64_t* place = places;
    for (int64_t k = 0; k < calls; ++k) {
      const int64_t count = functions[k] ? counts[k] : 2;
      for (int64_t i = 0; i < count; ++i, place += 4)
        a[i] = bases[place[step & 1]] + place[2] + step * place[3];
      if (!functions[k]) {
        std::memcpy(a[0], a[1], counts[k]);
        continue;
      }
      try {
        call_any(functions[k], a, count, std::make_index_sequence<MAX_ARGUMENTS + 1>());
      } catch (const std::exception& error) {
        std::strncpy(message, error.what(), size - 1);
        return -1 - step;
      }
    }
    if ((step & 15) == 15 && clock::now() > end) return step + 1;
  }
  return steps;
}
""".replace("MAX_ARGUMENTS", str(_MAX_ARGUMENTS))


class Place(NamedTuple):
    """Where a kernel finds a value: in two of the run's pieces of memory, one for the steps 0, 2,
    4, and one for 1, 3, 5.
    """

    even: int
    odd: int
    offset: int = 0
    stride: int = 0
    """Bytes from one step to the next."""


class _Call(NamedTuple):
    kernel: int
    """Its address; 0 for a copy (to the first argument, from the second)."""
    arguments: tuple[Place, ...]
    num_bytes: int = 0
    """Of a copy."""


@dataclass
class _Notes:
    """What code does with its inputs."""

    buffers: list[torch.Tensor] = field(default_factory=list)
    """That it made: they all stay, so that no two have the same address."""
    calls: list[tuple[int, list[int]]] = field(default_factory=list)
    """The address of a kernel, and those that it got."""
    fits: bool = True
    """Whether kernels got tensors only."""

    def empty(self, empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(*args: Any) -> torch.Tensor:
            self.buffers.append(empty(*args))
            return self.buffers[-1]

        return noted

    def kernel(self, address: int, kernel: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any) -> None:
            kernel(*args)
            self.fits &= len(args) <= _MAX_ARGUMENTS
            self.fits &= all(isinstance(each, torch.Tensor) for each in args)
            if self.fits:
                self.calls.append((address, [each.data_ptr() for each in args]))

        return noted


@dataclass(frozen=True)
class Replay:
    """A body as a list of calls."""

    calls: tuple[_Call, ...]
    num_carry: int
    scratch: int
    """Bytes for the values inside a step."""

    def run(self, steps: int, init: Tensors, xs: Tensors, reads: Tensors, ys: Tensors) -> Tensors:
        """Write all rows of ``ys``; returns the last carry.  All tensors are contiguous."""
        scratch = torch.empty(self.scratch, dtype=torch.uint8)
        carries = [x.clone() for x in init], [torch.empty_like(x) for x in init]
        pieces = [scratch, *carries[0], *carries[1], *xs, *reads, *ys]
        bases = (ctypes.c_void_p * len(pieces))(*(x.data_ptr() for x in pieces))
        functions, counts, places = self._arrays
        message = ctypes.create_string_buffer(4096)
        step = 0
        while step < steps:
            step = _library().repeat(
                step, steps, len(self.calls), functions, counts, places, bases, message, 4096
            )
            if step < 0:
                raise RuntimeError(message.value.decode(errors="replace"))
        return carries[steps % 2]

    @cached_property
    def _arrays(self) -> tuple[Any, Any, Any]:
        """The calls as C++ reads them."""
        kernels = [call.kernel for call in self.calls]
        counts = [call.num_bytes or len(call.arguments) for call in self.calls]
        places = [n for call in self.calls for place in call.arguments for n in place]
        return (
            (ctypes.c_void_p * len(kernels))(*kernels),
            (ctypes.c_int64 * len(counts))(*counts),
            (ctypes.c_int64 * len(places))(*places),
        )


@cache
def _library() -> Any:
    from torch._inductor import config
    from torch._inductor.codecache import CppCodeCache

    with config.patch({"cpp.vec_isa_ok": True}):  # _trace/compile says why
        library = CppCodeCache.load(_SOURCE)
    library.repeat.restype = ctypes.c_int64
    library.repeat.argtypes = [
        *[ctypes.c_int64] * 3,
        *[ctypes.c_void_p] * 4,
        ctypes.c_char_p,
        ctypes.c_int64,
    ]
    return library


# -- noting what code does -------------------------------------------------------------------------


def replay_of(code: Any, carry: Tensors, xs: Tensors, reads: Tensors) -> Replay | None:
    """The calls of a body's code, or None if it does more than to call kernels.

    Args:
        code: what Inductor made of a body: (carry, row of xs, reads) -> (next carry, row of ys).
        carry: of the first step, like all tensors contiguous.
        xs: at least one row.
        reads: what each step reads.
    """
    function = getattr(code, "__func__", code)
    kernels = _kernels(function)
    if kernels is None or any(x.numel() == 0 for x in (*carry, *xs, *reads)):
        return None
    notes = _Notes()
    scope = dict(function.__globals__)
    scope["empty_strided_cpu"] = notes.empty(scope["empty_strided_cpu"])
    scope |= {name: notes.kernel(kernels[name], scope[name]) for name in kernels}
    noting = FunctionType(
        function.__code__, scope, None, function.__defaults__, function.__closure__
    )
    owner = () if function is code else (code.__self__,)
    # clones, so that no two have the same address
    inputs = [x.clone() for x in (*carry, *(x[0] for x in xs), *reads)]
    results = noting(*owner, list(inputs))
    found = _replay(notes, inputs, results, len(carry), len(xs)) if notes.fits else None
    return found if found is not None and _agrees(found, code, carry, xs, reads) else None


def calls_only_kernels(code: Any) -> bool:
    """Whether a body's code does nothing but call kernels, as ``replay_of`` needs it."""
    return _kernels(getattr(code, "__func__", code)) is not None


def _agrees(found: Replay, code: Any, carry: Tensors, xs: Tensors, reads: Tensors) -> bool:
    """Whether two steps give, bit by bit, what the code gives."""
    steps = min(2, len(xs[0]))
    expected: Tensors = carry
    rows = []
    for k in range(steps):
        results = code([*expected, *(x[k] for x in xs), *reads])
        expected = results[: len(carry)]
        rows.append(results[len(carry) :])
    expected_ys = [torch.stack(ys) for ys in zip(*rows, strict=True)]
    ys = [torch.zeros_like(y) for y in expected_ys]
    last = found.run(steps, carry, xs, reads, ys)
    pairs = zip((*last, *ys), (*expected, *expected_ys), strict=True)
    return all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in pairs)


def _kernels(function: Any) -> dict[str, int] | None:
    """Name -> address of the kernels that a function uses, if it uses nothing else."""
    if not isinstance(function, FunctionType):
        return None
    code, scope = function.__code__, function.__globals__
    addresses = {name: _address(scope.get(name)) for name in code.co_names}
    found = {name: address for name, address in addresses.items() if address is not None}
    others = set(code.co_names) - found.keys() - _KNOWN
    is_plain = all(isinstance(getattr(torch, name, None), torch.dtype) for name in others)
    has_code = any(isinstance(each, CodeType) for each in code.co_consts)
    return found if is_plain and not has_code and "empty_strided_cpu" in scope else None


def _address(value: Any) -> int | None:
    """Of a kernel: Inductor compiles each into a module of its own, as the C function ``kernel``
    and a function of that name which takes tensors.
    """
    file = getattr(getattr(value, "__self__", None), "__file__", None)
    if not isinstance(value, BuiltinFunctionType) or file is None or value.__name__ != "kernel":
        return None
    return ctypes.cast(ctypes.CDLL(file).kernel, ctypes.c_void_p).value


def _replay(
    notes: _Notes, inputs: Tensors, results: Tensors, num_carry: int, num_rows: int
) -> Replay | None:
    """The calls that were noted for a step, with the places of what lies at their addresses."""
    buffers = {x.data_ptr(): x for x in notes.buffers}
    size = sum(x.nbytes + _ALIGNMENT for x in buffers.values())
    is_plain = all(x.is_contiguous() and x.numel() for x in results)
    if 0 in buffers or size > _MAX_BYTES or not is_plain:
        return None
    # the pieces of a run: scratch, both carries, rows, reads, outputs
    places: list[tuple[torch.Tensor, Place]] = []
    for k, x in enumerate(inputs):
        odd = 1 + k + num_carry
        is_row = num_carry <= k < num_carry + num_rows
        places.append((x, Place(1 + k if k < num_carry else odd, odd, 0, x.nbytes * is_row)))
    copies: list[tuple[Place, torch.Tensor]] = []
    for k, x in enumerate(results):
        number = 1 + len(inputs) + k
        target = (
            Place(1 + k + num_carry, 1 + k) if k < num_carry else Place(number, number, 0, x.nbytes)
        )
        buffer = buffers.get(x.data_ptr())
        if buffer is not None and buffer.nbytes == x.nbytes:
            # of results that are one buffer, the first is written in its place
            places.append((buffers.pop(x.data_ptr()), target))
        else:
            copies.append((target, x))
    scratch = 0
    for x in buffers.values():
        places.append((x, Place(0, 0, scratch)))
        scratch += -(-x.nbytes // _ALIGNMENT) * _ALIGNMENT

    def place(address: int) -> Place:
        for x, place in places:
            if x.data_ptr() <= address < x.data_ptr() + x.nbytes:
                return place._replace(offset=place.offset + address - x.data_ptr())
        raise AssertionError("a kernel got memory that its code did not make")

    calls = [_Call(kernel, tuple(map(place, addresses))) for kernel, addresses in notes.calls]
    calls += [_Call(0, (target, place(x.data_ptr())), x.nbytes) for target, x in copies]
    return Replay(tuple(calls), num_carry, scratch)
