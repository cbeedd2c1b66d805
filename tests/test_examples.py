"""Covers: examples/. Each program is run as a user runs it; the training also by its function."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _support import EAGER

import torchpmap as tp

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))
import data_parallel_digits as digits  # noqa: E402  (found through the line above)
import ensembles  # noqa: E402
import mcmc_chains  # noqa: E402
import wave_equation  # noqa: E402


def run(name: str, *arguments: str) -> str:
    # A fall-back to op-by-op execution is a warning, and would be a failure here.
    command = [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / name), *arguments]
    warm = "0" if "--no-compile" in arguments else "1"  # as by default: Inductor is imported once
    environment = os.environ | {"TORCHPMAP_WARM": warm}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
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
        *("--devices", "2", "--epochs", "1", "--no-compile", "--output", str(tmp_path)),
    )
    assert "after 1 epochs" in stdout
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


def test_pmap_cookbook_draws_rule_30_and_prints_the_numbers_of_jax():
    lines = run("pmap_cookbook.py", "--devices", "4", "--no-compile").splitlines()
    assert lines[-1] == "ok"
    assert "eight rows are on: cpu:0 cpu:1 cpu:2 cpu:3" in lines
    # jax.random.normal(key, (200, 300)) for the keys of jax.random.split(PRNGKey(0), 8), jax 0.10.2
    means = "means: [1.5411, 1.6979, 1.5533, 1.3423, 1.4597, 1.6165, 1.4635, 1.4969]"
    assert means in lines
    start = lines.index(" " * 20 + "*" + " " * 19)
    # Wolfram's rule 30: 1, 111, 11001, 1101111, 110010001
    triangle = [line.strip().replace(" ", "0") for line in lines[start : start + 5]]
    assert triangle == ["*", "***", "**00*", "**0****", "**00*000*"]
    assert lines[start + 20] == " *  *   ***  ****     **** *** **   *   "
    assert all(len(line) == 40 for line in lines[start : start + 21])


def test_wave_equation_command_line_checks_energy_and_writes_its_picture(tmp_path):
    arguments = ("--devices", "2", "--size", "40", "--steps", "60", "--no-compile")
    lines = run("wave_equation.py", *arguments, "--output", str(tmp_path)).splitlines()
    assert lines[0] == "2 blocks and the whole grid agree after 60 steps"
    assert lines[-1] == "ok"
    assert (tmp_path / "wave_equation.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("four_devices")
def test_wave_is_reflected_by_the_walls_alone_on_any_number_of_devices():
    whole = wave_equation.advance(
        wave_equation.first_wave(24), 40, wave_equation.pad_with_zeros
    ).now
    for n in (1, 2, 4):
        grids, energies = wave_equation.simulate(n, 24, 40, compile=EAGER)
        torch.testing.assert_close(grids[-1], whole, rtol=0, atol=1e-13)
        assert energies == pytest.approx([energies[0]] * 5, rel=1e-12)


@pytest.mark.usefixtures("four_devices")
def test_wave_refuses_a_grid_that_does_not_divide():
    with pytest.raises(ValueError, match="size=30 must be divisible by 4 devices"):
        wave_equation.simulate(4, 30, 10)


def test_ensembles_command_line_beats_its_members_and_writes_its_picture(tmp_path):
    arguments = ("--devices", "2", "--steps", "150", "--no-compile", "--output", str(tmp_path))
    lines = run("ensembles.py", *arguments).splitlines()
    assert lines[0] == "64 networks on 2 devices"
    assert lines[-1] == "ok"
    assert (tmp_path / "ensembles.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("four_devices")
def test_ensembles_train_the_same_networks_on_one_and_four_devices():
    one, four = (ensembles.train(n, 20, compile=EAGER)[0] for n in (1, 4))
    for name, parameter in one.items():
        assert len(four[name].devices()) == 4
        torch.testing.assert_close(
            four[name].cpu().flatten(0, 1), parameter.cpu().flatten(0, 1), atol=1e-5, rtol=1e-4
        )


def test_mcmc_chains_command_line_finds_the_known_moments():
    lines = run("mcmc_chains.py", "--devices", "2", "--samples", "250", "--no-compile").splitlines()
    assert lines[0] == "16 chains on 2 devices"
    assert lines[-1] == "ok"


def test_mcmc_chains_are_the_same_bit_by_bit_on_one_two_and_four_devices(monkeypatch):
    # a fifth of the operations to trace in each call
    monkeypatch.setattr(mcmc_chains, "LEAPFROG_STEPS", 2)
    monkeypatch.setattr(mcmc_chains, "SAMPLES_PER_CALL", 2)
    found = {}
    for n in (1, 2, 4):
        tp.init(num_devices=n)
        samples, _, _ = mcmc_chains.run(10, compile=EAGER)
        assert len(samples[0].devices()) == n
        found[n] = torch.cat([part.cpu() for part in samples], dim=1)
    assert found[1].shape == (16, 10, 2)
    assert found[1].std() > 0.1
    for n in (2, 4):
        assert torch.equal(found[n], found[1]), n
