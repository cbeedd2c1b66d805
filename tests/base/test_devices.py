"""Covers: _base/devices.py."""

import dataclasses
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import torchpmap as tp
from torchpmap._base.devices import (
    CUDA,
    PLATFORMS,
    Device,
    default_platform,
    enumerate_devices,
    has_accelerator,
    threads_per_device,
)
from torchpmap._base.platform import usable_cores
from torchpmap._runtime.torchrun.place import JobPlace, devices_of

TWO_GPUS = SimpleNamespace(
    name="cuda", is_hardware=True, count=lambda: 2, chosen=lambda: None, owned=None
)

pytestmark = pytest.mark.cpu_only("it expects the kinds of devices as they are without settings")


def with_cores(monkeypatch, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))


def with_gpus(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_device(monkeypatch):
    device = Device(1, "cpu")
    assert (device.id, device.platform, device.process_index) == (1, "cpu", 0)
    assert (str(device), repr(device)) == ("cpu:1", "Device(cpu:1)")
    assert device.torch_device == torch.device("cpu")
    assert device.device_kind == "cpu"
    assert str(Device(3, "cuda")) == "cuda:3"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    assert Device(2, "cuda", local_hardware_id=1).device_kind == "GPU 1"


def test_a_process_names_its_own_device_as_it_sees_it(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda number: None)
    monkeypatch.setattr(CUDA, "owned", None)
    CUDA.open(0, 3)  # a worker, or a process that sees only its GPU
    assert Device(3, "cuda", local_hardware_id=3).torch_device == torch.device("cuda:0")
    CUDA.open(1, 9)  # the second process on the second host
    assert Device(9, "cuda", 9, 1).torch_device == torch.device("cuda:1")
    text = r"cuda:1 belongs to another process \(process_index 1\) .* has only cuda:9"
    for ask in ("torch_device", "device_kind"):
        with pytest.raises(RuntimeError, match=text):
            getattr(Device(1, "cuda", 1), ask)


def test_before_the_start_only_the_own_device_has_a_number():
    place = JobPlace(3, 4, 1, 2, "host", 1, "torchrun")
    devices = devices_of(place, TWO_GPUS)
    assert [device.local_hardware_id for device in devices] == [None, None, None, 1]
    assert [device.process_index for device in devices] == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="cuda:2 belongs to another process"):
        devices[2].torch_device  # noqa: B018 - it raises


def test_device_is_a_value():
    assert {Device(1, "cpu"): "a"}[Device(1, "cpu")] == "a"
    assert len({Device(1, "cpu"), Device(2, "cpu"), Device(1, "cuda"), Device(1, "cpu", 1)}) == 4
    assert pickle.loads(pickle.dumps(Device(1, "cpu", 2))) == Device(1, "cpu", 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Device(1, "cpu").id = 2


@pytest.mark.parametrize(
    ("cores", "gpus", "kind", "count"),
    [(1, 0, "cpu", 1), (8, 0, "cpu", 8), (64, 0, "cpu", 8), (2, 1, "cuda", 1), (2, 4, "cuda", 4)],
)
def test_defaults(monkeypatch, cores, gpus, kind, count):
    with_cores(monkeypatch, cores)
    with_gpus(monkeypatch, gpus)
    assert (default_platform().name, default_platform().count()) == (kind, count)
    assert not torch.cuda.is_initialized()
    assert PLATFORMS["cpu"].count() == min(cores, 8)  # GPUs do not matter to it


@pytest.mark.parametrize(
    ("cores", "devices", "threads"), [(2, 8, 1), (8, 8, 1), (8, 3, 2), (16, 2, 8), (1, 1, 1)]
)
def test_threads_per_device(monkeypatch, cores, devices, threads):
    with_cores(monkeypatch, cores)
    assert threads_per_device(devices) == threads


def test_usable_cores_follows_the_affinity():
    def on_one_core() -> int:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread
        return usable_cores()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(on_one_core).result() == 1
    assert usable_cores() == len(os.sched_getaffinity(0))


def test_enumerate_devices(monkeypatch):
    assert enumerate_devices(3, "cpu") == (Device(0, "cpu"), Device(1, "cpu"), Device(2, "cpu"))
    with_gpus(monkeypatch, 2)
    found = enumerate_devices(2, "cuda")
    assert found == (Device(0, "cuda"), Device(1, "cuda"))
    # the controller of workers sees all devices
    assert [each.torch_device for each in found] == [torch.device("cuda:0"), torch.device("cuda:1")]
    with pytest.raises(ValueError, match="3 cuda devices were asked for, but 2 are visible"):
        enumerate_devices(3, "cuda")
    with_gpus(monkeypatch, 0)
    with pytest.raises(ValueError, match="1 cuda devices were asked for, but 0 are visible"):
        tp.init(device_type="cuda")


def test_tests_run_on_the_cpu_whatever_the_host_has(monkeypatch, request):
    request.addfinalizer(tp.shutdown)
    tp.shutdown()
    with_gpus(monkeypatch, 1)
    assert default_platform().name == "cuda"
    tp.init(2)
    assert tp.default_backend() == "cpu"


def test_what_has_never_been_run_must_be_asked_for(monkeypatch):
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert default_platform().name == "cpu"
    assert has_accelerator()  # the fork server must not touch it
    assert enumerate_devices(2, "xpu") == (Device(0, "xpu"), Device(1, "xpu"))
