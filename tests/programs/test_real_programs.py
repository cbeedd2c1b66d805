"""Whole programs that were written for JAX: their ports give JAX's numbers, step by step.

Covers: flax's and haiku's ImageNet loop (batch norms of one device and of all, a dynamic scale of
the loss, steps left out); score_sde's ``pmap(scan(step))`` and its predictor-corrector sampler;
FermiNet's variational Monte Carlo (Metropolis steps, local energies by forward over reverse
derivatives, a loss with a derivative of its own).

``real/NAME_jax.py`` made the numbers in ``real/NAME.json`` with the JAX that is named there;
``real/NAME_torch.py`` is the port. Both begin from the arrays of ``real/inputs.py``, and draw from
equal keys. Programs run as one traced graph (``graph``, and ``shared`` with two rows per device),
operation by operation on the devices (``uncompiled``), in this process (``inline``), and through
Inductor.
"""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _support import EAGER
from real import helium_torch, imagenet_torch, inputs, score_sde_torch

import torchpmap as tp

pytestmark = pytest.mark.timeout(600)  # large programs, traced several times

OPTIONS: dict[str, dict[str, Any]] = {
    "graph": {"compile": EAGER},
    "shared": {"compile": EAGER},
    "uncompiled": {"compile": False},
    "inline": {},
    "inductor": {},
}


MODES = pytest.mark.parametrize(
    "mode", [*list(OPTIONS)[:-1], pytest.param("inductor", marks=pytest.mark.inductor)]
)


def expected(name: str) -> Any:
    numbers = json.loads((Path(__file__).parent / "real" / f"{name}.json").read_text())
    assert numbers.pop("jax")  # its version
    return numbers


@contextlib.contextmanager
def mode_of(mode: str) -> Any:
    """Devices for a mode; the options of ``tp.pmap`` for it."""
    tp.init(num_devices=2 if mode == "shared" else inputs.NUM_DEVICES)
    with tp.debug.fake_pmap() if mode == "inline" else contextlib.nullcontext():
        yield OPTIONS[mode]


def check(found: Any, wanted: Any, rtol: float, atol: float, path: str = "") -> None:
    """Numbers agree; None, which JSON has for NaN, agrees with NaN."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), path
        for name, value in wanted.items():
            check(found[name], value, rtol, atol, f"{path}/{name}")
        return
    numbers = [np.asarray(values, dtype=np.float64) for values in (found, wanted)]
    np.testing.assert_allclose(*numbers, rtol=rtol, atol=atol, err_msg=path)


@pytest.mark.long
@pytest.mark.parametrize("run", imagenet_torch.RUNS)
@MODES
def test_imagenet(run: str, mode: str) -> None:
    wanted = expected("imagenet")[run]
    with mode_of(mode) as options:
        found = imagenet_torch.run(**imagenet_torch.RUNS[run], **options)
    assert math.isnan(found["loss"][inputs.BROKEN])
    found["accuracy"][inputs.BROKEN] = math.nan  # of a comparison with NaN
    for exact in ("finite", "scale", "count"):
        assert found.pop(exact) == wanted.pop(exact)
    # float16 has 3 digits, and each device and each compiler rounds elsewhere
    tolerance = {"rtol": 1e-2, "atol": 2e-2} if run == "half" else {"rtol": 1e-5, "atol": 1e-5}
    check(found, wanted, **tolerance)
    assert (found["spread"] > 1e-4) == (run != "synced")


@pytest.mark.long
@MODES
def test_score_sde(mode: str) -> None:
    wanted = expected("score_sde")
    with mode_of(mode) as options:
        found = score_sde_torch.run(**options)
    assert np.mean(found["losses"][-1]) < 0.8 * found["losses"][0][0]  # it learns
    samples, wanted_samples = found.pop("samples"), wanted.pop("samples")
    check(found, wanted, rtol=1e-4, atol=1e-5)
    check(samples, wanted_samples, rtol=1e-3, atol=1e-4 * np.abs(wanted_samples).max())


def without_repulsion() -> helium_torch.Params:
    """Parameters of exp(-2 (r1 + r2))."""
    params = helium_torch.from_numpy(inputs.helium_params())
    params = {name: torch.zeros_like(value) for name, value in params.items()}
    for spin in ("up", "down"):
        params[f"{spin}.bias"] += 1
        params[f"{spin}.decay"] += helium_torch.CHARGE
    return params


def test_local_energy_of_two_hydrogen_like_electrons() -> None:
    """exp(-Z (r1 + r2)) has the energy -Z**2 wherever the electrons are, if they do not repel."""
    data = torch.from_numpy(inputs.walkers(3)).flatten(0, 1)
    apart = (data[:, :3] - data[:, 3:]).norm(dim=1)
    energies = tp.vmap(helium_torch.local_energy, in_axes=(None, 0))(without_repulsion(), data)
    torch.testing.assert_close(energies, 1 / apart - helium_torch.CHARGE**2)


@pytest.mark.long
@MODES
def test_helium(mode: str) -> None:
    wanted = expected("helium")
    assert abs(np.mean(wanted.pop("long")[-5:]) + 2.9037) < 1e-3  # where this is going
    with mode_of(mode) as options:
        found = helium_torch.run(**options)
    # float64; Adam divides by the size of small gradients
    check(found, wanted, rtol=1e-6, atol=1e-7)
