"""Covers: _runtime/completion.py on the lagging platform, in this process."""

import queue
import threading
import weakref

import pytest
import torch
from _platforms import Lagging

from torchpmap._base.errors import GroupLost
from torchpmap._runtime.completion import Completion

KIND = [((2,), torch.float32)]


class Device:
    """A lagging device, and what its completion thread says."""

    def __init__(self, begun=None):
        self.platform = Lagging()
        self.noted: queue.Queue = queue.Queue()
        self.failed: list = []
        self.is_aborted = False
        self.seq = 0
        self.completion = Completion(
            self.platform,
            lambda: self.is_aborted,
            self.noted.put,
            lambda seq, doing, error: self.failed.append((seq, doing, error)),
            *([] if begun is None else [begun.put]),
        )

    def launch(self, run, *inputs, communicates=False):
        results = self.platform.launch(run, list(inputs), KIND)
        self.seq += 1
        self.completion.launched(self.seq, f"call {self.seq}", communicates)
        return results[0]

    def close(self):
        self.completion.close()
        self.platform.close()

    def all_noted(self):
        return [self.noted.get_nowait() for _ in range(self.noted.qsize())]


@pytest.fixture
def device():
    device = Device()
    yield device
    device.close()


@pytest.fixture
def gate():
    opened = threading.Event()
    yield opened
    opened.set()


def raising(error):
    def run(*_):
        raise error

    return run


def test_a_command_is_done_when_the_device_is(device, gate):
    def slow(xs):
        gate.wait()
        return [xs[0] + 1]

    first = device.launch(slow, torch.ones(2))
    second = device.launch(lambda xs: [xs[0] * 10], first)  # its input is not computed yet
    assert device.all_noted() == []
    gate.set()
    assert device.completion.settle()
    assert device.all_noted() == [1, 2]
    assert second.tolist() == [20, 20]


def test_waiting_for_one_command(device, gate):
    def slow(_):
        gate.wait()
        return [torch.ones(2)]

    device.launch(lambda _: [torch.ones(2)])
    device.launch(slow)
    assert device.completion.wait(1)
    assert device.completion.done == 1
    gate.set()
    assert device.completion.wait(2)
    device.launch(raising(ValueError("late")))
    assert not device.completion.wait(3)
    assert device.completion.done == 2


def test_a_command_begins_when_the_one_before_it_is_done(gate):
    device = Device(begin := queue.Queue())
    device.launch(lambda _: [torch.ones(2)])
    device.launch(lambda _: [gate.wait() and torch.ones(2)])
    device.launch(lambda _: [torch.ones(2)])
    assert [begin.get(), begin.get(), begin.qsize()] == [1, 2, 0]
    gate.set()
    assert begin.get() == 3
    device.close()


def test_an_error_comes_late_and_once(device):
    device.launch(lambda _: [torch.ones(2)])
    device.launch(raising(ValueError("late")))
    device.launch(lambda _: [torch.ones(2)])
    assert not device.completion.settle()
    ((seq, doing, error),) = device.failed
    assert (seq, doing, str(error)) == (2, "call 2", "late")
    assert device.all_noted() == [1]  # none behind the failure


def test_a_new_epoch_notes_again(device):
    device.launch(raising(ValueError("late")))
    device.completion.renew()
    device.launch(lambda _: [torch.ones(2)])
    assert device.completion.settle()
    assert device.all_noted() == [2]


@pytest.mark.parametrize("communicates", [False, True])
def test_what_an_abort_may_have_cut_is_not_done(device, gate, communicates):
    def cut(_):
        gate.wait()
        raise GroupLost("aborted")  # which a device does not tell

    device.launch(cut if communicates else lambda _: [torch.ones(2)], communicates=communicates)
    device.is_aborted = True
    device.platform.abort([])
    gate.set()
    assert device.completion.settle() is not communicates
    assert [type(error) for _, _, error in device.failed] == [GroupLost] * communicates


@pytest.mark.parametrize("error", [IndexError("index out of range in self"), ValueError("late")])
def test_an_assert_in_a_kernel_ends_the_device_and_an_error_of_the_function_does_not(device, error):
    device.launch(raising(error))
    assert not device.completion.settle()
    ((_, _, found),) = device.failed
    assert device.platform.recover(found) is (type(error) is ValueError)
    if type(error) is IndexError:
        for use in (lambda: device.launch(lambda _: [torch.ones(2)]), device.platform.synchronize):
            with pytest.raises(IndexError):
                use()


def test_memory_of_the_host_is_let_go_when_the_device_is_done(device):
    source = torch.ones(2)
    device.platform.upload(source, torch.device("cpu"))
    device.completion.launched(1, "receiving a value", False, source)
    gone = weakref.ref(source)
    del source
    assert device.completion.settle()
    assert gone() is None  # no other command has come
