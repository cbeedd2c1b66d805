"""Covers: meshes of several axes under torchrun: one job runs the cases of _torchrun_layouts.py."""

from pathlib import Path
from typing import Any

import pytest
from _launched import answers, check, launch
from _support import names_to_run
from _torchrun_layouts import CASES

pytestmark = pytest.mark.long

PROGRAM = str(Path(__file__).with_name("_torchrun_layouts.py"))


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("layouts")
    finished = launch(4, PROGRAM, str(folder), *names_to_run(request, "test_case"))
    assert finished.code == 0, finished.output
    return answers(4, folder)


@pytest.mark.parametrize("name", CASES)
def test_case(results, name):
    for rank, got in enumerate(results):
        check(got[name], CASES[name][1], f"rank {rank}")


def test_meshes_that_have_no_grid_in_common():
    finished = launch(6, str(Path(__file__).with_name("_torchrun_six.py")))
    assert finished.code == 0, finished.output
