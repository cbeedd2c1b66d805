"""Covers: the Makefile: which environment is set up for which torch and Python."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = "python{}.{}".format(*sys.version_info)


def commands(folder: Path, *arguments: str) -> list[str]:
    """What ``make test`` would run, were nothing set up yet."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        (folder / name).write_text((ROOT / name).read_text())
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}  # without a PYTHON or MAKEFLAGS
    command = ["make", "--dry-run", "test", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


def test_the_pinned_torch(tmp_path: Path) -> None:
    found = commands(tmp_path, f"PYTHON={sys.executable}")
    pip = ".venv/bin/python -m pip install --quiet -c constraints.txt"
    assert f"{pip} torch==2.13.0" in found
    assert f"{pip} -e '.[examples,dev]'" in found
    assert found[-1] == ".venv/bin/python -m pytest"


def test_the_torch_of_last_night(tmp_path: Path) -> None:
    found = commands(tmp_path, "TORCH=nightly")
    index = "--pre --extra-index-url https://download.pytorch.org/whl/nightly/cpu"
    assert f".venv-nightly/bin/python -m pip install --quiet {index} torch" in found


@pytest.mark.parametrize("given", [False, True], ids=["any python", "a given python"])
def test_another_torch_gets_its_own_environment(tmp_path: Path, given: bool) -> None:
    python = (f"PYTHON={sys.executable}",) if given else ()
    found = commands(tmp_path, "TORCH=2.15.0", *python)
    folder = f".venv-2.15.0-{PYTHON}" if given else ".venv-2.15.0"
    pip = f"{folder}/bin/python -m pip install --quiet torch==2.15.0"  # no dependency replaces it
    assert {pip, f"{pip} -e '.[examples,dev]'"} <= set(found)
    assert found[-1] == f"{folder}/bin/python -m pytest"
