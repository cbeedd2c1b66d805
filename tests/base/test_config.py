"""Covers: _base/config.py."""

import dataclasses

import pytest

from torchpmap._base import config
from torchpmap._base.config import Config, Settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for field in dataclasses.fields(Config):
        monkeypatch.delenv(f"TORCHPMAP_{field.name.upper()}", raising=False)


def test_defaults():
    assert Config.from_env({}) == Config() == Config(None, None, True, None, True, "auto")


def test_environment():
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


RUNTIME = "must be 'auto', 'local', 'torchrun' or 'inline', but got 'remote'."
NUM = "must be an int from 1 to 256, but got"
TYPE = "must be 'cpu' or 'cuda' or 'xpu', but got"
TIME = "must be a number of seconds above 0 (at most 1e9), but got"


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("NUM_DEVICES", "0", f"{NUM} 0."),
        ("NUM_DEVICES", "257", f"{NUM} 257."),
        ("NUM_DEVICES", "-1", f"{NUM} -1."),
        ("NUM_DEVICES", "four", f"{NUM} 'four'."),
        ("NUM_DEVICES", "4.0", f"{NUM} '4.0'."),
        ("DEVICE_TYPE", "gpu", f"{TYPE} 'gpu'."),
        ("WARM", "yes", "must be 0 or 1, but got 'yes'."),
        ("SHARED_MEMORY", "no", "must be 0 or 1, but got 'no'."),
        ("TIMEOUT", "0", f"{TIME} 0.0."),
        ("TIMEOUT", "inf", f"{TIME} inf."),
        ("TIMEOUT", "nan", f"{TIME} nan."),
        ("TIMEOUT", "soon", f"{TIME} 'soon'."),
        ("RUNTIME", "remote", RUNTIME),
    ],
)
def test_bad_environment(variable, text, message):
    with pytest.raises(ValueError) as info:  # noqa: PT011 (the whole text follows)
        Config.from_env({f"TORCHPMAP_{variable}": text})
    assert str(info.value) == f"TORCHPMAP_{variable} {message}"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_devices", 0, f"{NUM} 0."),
        ("num_devices", True, f"{NUM} True."),
        ("num_devices", 4.0, f"{NUM} 4.0."),
        ("device_type", "tpu", f"{TYPE} 'tpu'."),
        ("device_type", ["cpu"], f"{TYPE} ['cpu']."),
        ("warm", 1, "must be True or False, but got 1."),
        ("warm", None, "must be True or False, but got None."),
        ("timeout", -1, f"{TIME} -1."),
        ("timeout", True, f"{TIME} True."),
        ("timeout", "2", f"{TIME} '2'."),
        ("runtime", "remote", RUNTIME),
    ],
)
def test_bad_value(name, value, message):
    settings = Settings()
    before = settings.snapshot()
    for assign in (lambda: Config(**{name: value}), lambda: setattr(settings, name, value)):
        with pytest.raises(ValueError) as info:  # noqa: PT011 (the whole text follows)
            assign()
        assert str(info.value) == f"{name} {message}"
    assert settings.snapshot() == before


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().warm = False


def test_assignment_beats_environment_and_reset_returns_to_it(monkeypatch):
    settings = Settings()
    monkeypatch.setenv("TORCHPMAP_NUM_DEVICES", "3")
    assert settings.num_devices == 3
    settings.num_devices = 5
    settings.timeout = 7
    assert settings.snapshot() == Config(num_devices=5, timeout=7.0)
    settings.num_devices = None
    assert settings.num_devices is None
    settings.reset()
    assert settings.snapshot() == Config(num_devices=3)


def test_an_earlier_snapshot_does_not_change():
    settings = Settings()
    before = settings.snapshot()
    settings.warm = False
    assert before.warm is True
    assert settings.warm is False


def test_the_environment_is_read_late_and_the_runtime_again_after_a_change(monkeypatch):
    settings = Settings()
    assert not settings.is_inline
    monkeypatch.setenv("TORCHPMAP_RUNTIME", "inline")
    assert not settings.is_inline
    settings.reset()
    assert settings.is_inline
    settings.runtime = "local"
    assert not settings.is_inline
    monkeypatch.setenv("TORCHPMAP_WARM", "maybe")
    with pytest.raises(ValueError, match="TORCHPMAP_WARM must be 0 or 1, but got 'maybe'"):
        settings.snapshot()


def test_unknown_setting():
    settings = Settings()
    text = "no setting 'devices'; settings are num_devices, device_type, warm, timeout"
    with pytest.raises(AttributeError, match=text):
        settings.devices = 4
    with pytest.raises(AttributeError, match=text):
        _ = settings.devices
    assert {"num_devices", "reset"} <= set(dir(settings))


def test_repr():
    settings = Settings()
    settings.num_devices = 2
    assert repr(settings) == (
        "<torchpmap settings: Config(num_devices=2, device_type=None, warm=True, timeout=None, "
        "shared_memory=True, runtime='auto', check_captured=True, "
        "log_compiles=False, progress=True, traceback='folded')>"
    )
    assert type(config.config) is Settings
