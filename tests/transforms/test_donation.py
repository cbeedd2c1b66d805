"""Covers: donation, as the values that workers hold show it."""

import gc

import pytest
import torch
from _support import EAGER, LAGS, TRACED, live_tensors

import torchpmap as tp

pytestmark = pytest.mark.cpu_only("it looks at the tensors of processes")

NUM_DEVICES = 2
NUM_ELEMENTS = 12_345


@torch.library.custom_op("test_donation::count", mutates_args=())
def count_live(x: torch.Tensor) -> torch.Tensor:
    """How many tensors of as many elements the process holds."""
    tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.numel() == x.numel()]
    return torch.tensor(len({o.untyped_storage().data_ptr() for o in tensors}))


@count_live.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


def held_in_the_call(compile, donate_argnums):
    """How many values a worker holds when a call has used its argument for the last time."""
    tp.init(NUM_DEVICES)

    def step(x):
        doubled = x * 2
        return doubled, count_live(doubled)

    mapped = tp.pmap(step, donate_argnums=donate_argnums, compile=compile)
    x = tp.device_put(torch.zeros(NUM_DEVICES, NUM_ELEMENTS), tp.devices())
    x, _ = mapped(x)  # the first call checks what the operation promised
    counts = mapped(x)[1]
    return counts.tolist()


WAYS = [pytest.param(each.values[0], False, id=each.id) for each in TRACED]
WAYS += [pytest.param(False, False, id="uncompiled"), pytest.param(EAGER, True, id="lowered")]


@pytest.mark.parametrize(("compile", "is_lowered"), WAYS)
def test_donated_values_are_gone_after_the_call(compile, is_lowered):
    tp.init(NUM_DEVICES)
    for donate_argnums, held in ((0, 1), ((), 4)):
        step = tp.pmap(lambda x: x + 1, donate_argnums=donate_argnums, compile=compile)
        kept = [tp.device_put(torch.zeros(NUM_DEVICES, NUM_ELEMENTS), tp.devices())]
        step = step.lower(kept[0]).compile() if is_lowered else step
        for _ in range(3):
            kept.append(step(kept[-1]))
        assert kept[-1][:, 0].tolist() == [3.0] * NUM_DEVICES
        assert [x.is_deleted() for x in kept] == [held == 1] * 3 + [False]
        assert live_tensors(NUM_ELEMENTS, NUM_DEVICES) == [held] * NUM_DEVICES


@pytest.mark.skipif(LAGS, reason="results are allocated at the launch, not in order of the stream")
@pytest.mark.parametrize("compile", TRACED)
def test_a_donated_argument_is_freed_before_the_call_ends(compile):
    assert held_in_the_call(compile, donate_argnums=0) == [1, 1]
    assert held_in_the_call(compile, donate_argnums=()) == [2, 2]


def test_a_compiled_call_takes_what_it_is_given_once():
    tp.init(NUM_DEVICES)
    x = tp.device_put(torch.zeros(NUM_DEVICES, 3), tp.devices())
    call = tp.pmap(torch.add, donate_argnums=0, compile=EAGER).lower(x, x * 1).compile()
    with pytest.raises(ValueError, match=r"args\[0\] is donated, but .* also argument args\[1\]"):
        call(x, x)
    assert call(x, torch.ones(NUM_DEVICES, 3)).sum().item() == 6
    with pytest.raises(RuntimeError, match=r"deleted by pmap\(add.* which it was donated to"):
        call(x, torch.ones(NUM_DEVICES, 3))
