"""Covers: that an assignment to ``tp.config`` applies at once or raises: _runtime/current.py."""

import pytest
import torch
from _support import EAGER, OTHER

import torchpmap as tp
from torchpmap._runtime.local.forkserver import server

rows = torch.arange(2.0)
double = tp.pmap(lambda x: x * 2, compile=EAGER)


@pytest.fixture(autouse=True)
def afterwards():
    tp.shutdown()
    yield
    tp.shutdown()
    tp.config.reset()


READ_AT_START = {
    "num_devices": 3,
    "device_type": OTHER,
    "warm": True,
    "shared_memory": False,
    "runtime": "torchrun",
}


@pytest.mark.parametrize("name", READ_AT_START)
def test_what_devices_read_when_they_start_cannot_change_while_they_run(name):
    before, value = getattr(tp.config, name), READ_AT_START[name]
    tp.init(2)
    x = double(rows)
    with pytest.raises(RuntimeError) as caught:
        setattr(tp.config, name, value)
    instead = {
        "num_devices": ", or give it to torchpmap.init(num_devices=...)",
        "device_type": ", or give it to torchpmap.init(device_type=...)",
    }
    assert str(caught.value) == (
        f"torchpmap.config.{name} = {value!r}: the devices run, and have read this setting when "
        "they started. Assign it before torchpmap is first used, or after torchpmap.shutdown()"
        f"{instead.get(name, '')}."
    )
    assert getattr(tp.config, name) == before
    setattr(tp.config, name, before)  # no change
    assert x.tolist() == [0, 2]
    tp.shutdown()
    setattr(tp.config, name, value)
    assert getattr(tp.config, name) == value


def test_the_number_of_devices_applies_as_soon_as_none_run():
    tp.config.num_devices = 3
    assert tp.device_count() == 3
    tp.config.num_devices = 2  # planned, but not started
    assert tp.device_count() == 2
    assert double(rows).tolist() == [0, 2]
    tp.init(num_devices=3)
    assert tp.device_count() == 3
    tp.shutdown()
    tp.config.num_devices = 4
    tp.init()
    assert tp.device_count() == 4


def test_workers_are_forked_from_a_process_with_the_setting_warm():
    """One that was started without it is replaced."""
    tp.config.warm = False
    assert double(rows).tolist() == [0, 2]
    tp.shutdown()
    tp.config.warm = True
    assert double(rows).tolist() == [0, 2]
    with open(f"/proc/{server.pid}/environ", "rb") as file:
        assert b"TORCHPMAP_WARM=1" in file.read().split(b"\0")


def test_a_reset_is_no_assignment():
    tp.config.num_devices = 2
    assert double(rows).tolist() == [0, 2]
    tp.config.reset()
    assert double(rows).tolist() == [0, 2]
