"""Covers: tests/gpu.py and benchmarks/gpu.py, on a machine without a GPU and in a Python that has
only torch, numpy, cloudpickle, pytest and what these need.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from _support import SCALE

ROOT = Path(__file__).parents[2]
INSTALLED = (
    *("torch", "torchgen", "functorch", "numpy", "cloudpickle", "pytest", "_pytest"),
    *("sympy", "mpmath", "filelock", "typing_extensions", "networkx", "jinja2", "markupsafe"),
    *("fsspec", "iniconfig", "pluggy", "packaging", "pygments", "py", "setuptools"),
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.cpu_only("it is about machines without a GPU")]


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A Python without pytest's plugins, and whatever else this one has."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in INSTALLED:
        found = importlib.util.find_spec(name)
        assert found is not None, name
        origin = Path(found.origin)
        target = origin.parent if origin.name == "__init__.py" else origin
        (packages / target.name).symlink_to(target)
        libraries = target.with_name(f"{name}.libs")  # of a wheel that brings its own
        if libraries.exists():
            (packages / libraries.name).symlink_to(libraries)
    return folder / "bin" / "python"


def run(*command: object, code: int = 0) -> str:
    """What a command of the repository prints."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHPMAP_", "PYTEST"))}
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": ".", "TORCHPMAP_TEST_SCALE": str(SCALE)},
        timeout=250 * SCALE,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


FILES = ("base/test_axis_spec.py", "base/test_default_device.py")
"""One that needs hypothesis, one that starts a pool."""


def test_the_suite_runs_in_a_bare_python(bare, tmp_path):
    command = (bare, "tests/gpu.py", "--output", tmp_path, "--section", "one", "--files")
    first, *lines = run(*command, FILES[1]).splitlines()
    assert first.startswith("No GPU here: the lagging platform stands for it.")
    assert lines[0].startswith(f"ok     one {FILES[1]}: ")
    assert " passed" in lines[0]
    # the same folder: what is done is not done again
    again = run(*command, *FILES).splitlines()
    assert [line.partition(" (")[0] for line in again[1:-1]] == [
        f"ok     one {FILES[0]}: it needs hypothesis"
    ]
    results = [json.loads(line) for line in (tmp_path / "tests.jsonl").read_text().splitlines()]
    assert [result["file"] for result in results] == [FILES[1], FILES[0]]
    assert results[0]["counts"]["passed"] > 0
    assert "| one | 2 |" in (tmp_path / "tests.md").read_text()


FAILING = """
import signal, time, os
import pytest, torch
import torchpmap as tp
from _support import LAGS


def test_good():
    assert LAGS


def test_bad():
    assert tp.pmap(lambda x: x + 1, compile=False)(torch.zeros(2)).tolist() == [2, 2]


@pytest.mark.timeout(0.5)
def test_endless():
    time.sleep(60)


def test_deadly():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_failures_are_written_down(bare, tmp_path):
    path, output = tmp_path / "test_made.py", tmp_path / "output"
    path.write_text(FAILING)
    command = (bare, "tests/gpu.py", "--output", output, "--section", "shared", "--files", path)
    assert f"FAILED shared {path}: 1 passed, 2 failed" in run(*command, code=1)
    (line,) = (output / "tests.jsonl").read_text().splitlines()
    failures = {key.rpartition("::")[2]: text for key, text in json.loads(line)["failures"].items()}
    assert "[1.0, 1.0] == [2, 2]" in failures["test_bad"]
    assert "it took longer than 0.5 s" in failures["test_endless"]
    assert "it ended with code -9" in failures[str(path)]
    assert f"## shared {path}" in (output / "tests.md").read_text()


def test_a_limit_of_time_leaves_the_rest_for_later(tmp_path):
    command = (sys.executable, "tests/gpu.py", "--output", tmp_path, "--minutes", "0.05")
    printed = run(
        *command, "--section", "shared", "--part", "2/3", "--files", "a.py", "b.py", "c.py"
    )
    assert "not run yet: shared b.py\n" in printed
    assert "a.py" not in printed
