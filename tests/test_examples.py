"""Covers: examples/. Each program is run as a user runs it; the training also by its function."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchpmap as tp

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
import data_parallel_digits as digits  # noqa: E402  (found through the line above)


def run(name: str, *arguments: str) -> str:
    # A fall-back to op-by-op execution is a warning, and would be a failure here.
    command = [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr, result.stderr
    return result.stdout


def test_hello_pmap_prints_what_plain_torch_computes():
    lines = run("hello_pmap.py").splitlines()
    assert "doubled: [0.0, 2.0, 4.0, 6.0]" in lines
    assert "doubled lives on: cpu:0 cpu:1 cpu:2 cpu:3" in lines
    assert "axis index: [0.0, 11.0, 22.0, 33.0]" in lines
    assert "rotated: [3.0, 0.0, 1.0, 2.0]" in lines
    assert lines[-1] == "ok"


def test_compose_prints_what_plain_torch_computes():
    lines = run("compose.py").splitlines()
    assert "w = [2.0, -3.0, 0.5], b = 1.00" in lines
    assert "16 patches on 4 devices: values from 0.0 to 1.0" in lines
    assert lines[-3].endswith("[80.0, 80.0, 80.0, 80.0]")
    assert lines[-2].endswith("[0.0, 0.0, 0.0, 4.0]")
    assert lines[-1] == "ok"


def test_digits_command_line_trains_and_writes_both_pictures(tmp_path):
    stdout = run(
        "data_parallel_digits.py",
        *("--devices", "2", "--epochs", "2", "--no-compile", "--output", str(tmp_path)),
    )
    assert "after 2 epochs" in stdout
    for name in ("digits_training.png", "digits_predictions.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG"), name


@pytest.fixture
def four_devices():
    tp.init(num_devices=4)


@pytest.mark.usefixtures("four_devices")
def test_digits_train_the_same_network_on_one_two_and_four_devices():
    runs = {n: digits.train(n, epochs=2, compile={"backend": "eager"}) for n in (1, 2, 4)}
    params, history, accuracy = runs[1]
    assert accuracy > 0.9
    for n in (2, 4):
        other_params, other_history, other_accuracy = runs[n]
        torch.testing.assert_close(other_params, params, atol=1e-5, rtol=1e-4)
        assert other_history.loss == pytest.approx(history.loss, rel=1e-4)
        assert other_accuracy == accuracy


@pytest.mark.usefixtures("four_devices")
def test_digits_refuses_a_batch_that_does_not_divide():
    with pytest.raises(ValueError, match="batch size, 70, must be divisible by 4 devices"):
        digits.train(4, epochs=1, batch_size=70)
