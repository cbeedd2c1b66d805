"""Covers: _base/config.py."""

import dataclasses

import pytest

import torchpmap as tp
from torchpmap._base import config
from torchpmap._base.config import Config, Settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for field in dataclasses.fields(Config):
        monkeypatch.delenv(f"TORCHPMAP_{field.name.upper()}", raising=False)


def test_environment():
    assert Config.from_env({}) == Config() == Config(None, None, True, None, True, "auto")
    environ = {
        "TORCHPMAP_NUM_DEVICES": "6",
        "TORCHPMAP_DEVICE_TYPE": " cpu ",
        "TORCHPMAP_WARM": "0",
        "TORCHPMAP_TIMEOUT": " 2.5 ",
        "TORCHPMAP_SHARED_MEMORY": "0",
        "TORCHPMAP_RUNTIME": "inline",
        "TORCHPMAP_OTHER": "x",
    }
    assert Config.from_env(environ) == Config(6, "cpu", False, 2.5, False, "inline")
    assert Config.from_env(environ, num_devices=2).num_devices == 2
    assert Config.from_env({"TORCHPMAP_NUM_DEVICES": ""}).num_devices is None
    assert [Config(num_devices=limit).num_devices for limit in (1, 256)] == [1, 256]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().warm = False


MUST = {
    "num_devices": "must be an int from 1 to 256",
    "device_type": "must be 'cpu' or 'cuda' or 'xpu'",
    "warm": "must be True or False",
    "timeout": "must be a number of seconds above 0 (at most 1e9)",
    "runtime": "must be 'auto', 'local', 'torchrun' or 'inline'",
}
TEXTS = {  # of variables, and as what they are read
    "num_devices": {"0": 0, "257": 257, "-1": -1, "four": "four", "4.0": "4.0"},
    "device_type": {"gpu": "gpu"},
    "warm": {"yes": "yes"},
    "shared_memory": {"no": "no"},
    "timeout": {"0": 0.0, "inf": float("inf"), "nan": float("nan"), "soon": "soon"},
    "runtime": {"remote": "remote"},
}
VALUES = {
    "num_devices": [0, True, 4.0],
    "device_type": ["tpu", ["cpu"]],
    "warm": [1, None],
    "timeout": [0, -1, True, "2", float("nan"), float("inf"), 10**400, 1e300],
    "runtime": ["remote"],
}


@pytest.mark.parametrize(("name", "text"), [(name, t) for name in TEXTS for t in TEXTS[name]])
def test_bad_environment(name, text):
    must = "must be 0 or 1" if name in ("warm", "shared_memory") else MUST[name]
    with pytest.raises(ValueError) as info:  # noqa: PT011 (the whole text follows)
        Config.from_env({f"TORCHPMAP_{name.upper()}": text})
    got = TEXTS[name][text]
    assert str(info.value) == f"TORCHPMAP_{name.upper()} {must}, but got {got!r}."


@pytest.mark.parametrize(("name", "value"), [(name, v) for name in VALUES for v in VALUES[name]])
@pytest.mark.parametrize("assigned", [False, True])
def test_bad_value(name, value, assigned):
    settings = Settings()
    before = settings.snapshot()
    with pytest.raises(ValueError) as info:  # noqa: PT011 (the whole text follows)
        setattr(settings, name, value) if assigned else Config(**{name: value})
    assert str(info.value) == f"{name} {MUST[name]}, but got {value!r}."
    assert settings.snapshot() == before


@pytest.mark.parametrize("value", VALUES["timeout"])
def test_bad_timeout_of_a_function(value):
    with pytest.raises(ValueError, match=r"^pmap: timeout ") as info:
        tp.pmap(len, timeout=value)
    assert str(info.value) == f"pmap: timeout {MUST['timeout']}, but got {value!r}."


def test_assignment_beats_the_environment_which_is_read_late(monkeypatch):
    settings = Settings()
    monkeypatch.setenv("TORCHPMAP_NUM_DEVICES", "3")
    before = settings.snapshot()
    assert before.num_devices == settings.num_devices == 3
    settings.num_devices = 5
    assert before.num_devices == 3
    settings.timeout = 7
    assert settings.snapshot() == Config(num_devices=5, timeout=7.0)
    settings.num_devices = None
    assert settings.num_devices is None
    settings.reset()
    assert settings.snapshot() == Config(num_devices=3)
    assert not settings.is_inline  # kept until a change
    monkeypatch.setenv("TORCHPMAP_RUNTIME", "inline")
    assert not settings.is_inline
    settings.reset()
    assert settings.is_inline
    settings.runtime = "local"
    assert not settings.is_inline
    monkeypatch.setenv("TORCHPMAP_WARM", "maybe")
    with pytest.raises(ValueError, match="TORCHPMAP_WARM must be 0 or 1, but got 'maybe'"):
        settings.snapshot()


def test_an_assignment_while_another_thread_asks():
    """What is kept until the next change would be that of before."""

    class Busy(Settings):
        def snapshot(self):
            found = super().snapshot()
            if not self._set:
                self.debug_nans = True
            return found

    settings = Busy()
    assert settings.sought == ()
    assert settings.sought == ("NaN",)


def test_unknown_setting():
    settings = Settings()
    text = "no setting 'devices'; settings are num_devices, device_type, warm, timeout"
    with pytest.raises(AttributeError, match=text):
        settings.devices = 4
    with pytest.raises(AttributeError, match=text):
        _ = settings.devices
    assert {"num_devices", "reset"} <= set(dir(settings))
    assert Settings.__annotations__ == Config.__annotations__


def test_repr():
    settings = Settings()
    settings.num_devices = 2
    assert repr(settings) == (
        "<torchpmap settings: Config(num_devices=2, device_type=None, warm=True, timeout=None, "
        "shared_memory=True, runtime='auto', check_captured=True, "
        "log_compiles=False, progress=True, traceback='folded', gathers='allow', debug_nans=False, "
        "debug_infs=False)>"
    )
    assert type(config.config) is Settings
