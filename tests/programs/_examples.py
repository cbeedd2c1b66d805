"""Running the programs in ``examples/``: in this process, by python and by torchrun."""

import contextlib
import io
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from _launched import launch, run_program

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))  # they are imported too


def run_here(name: str, *arguments: str) -> str:
    """Run a program as ``__main__`` of this process, and return what it prints."""
    script, printed = str(EXAMPLES / name), io.StringIO()
    with (
        contextlib.ExitStack() as after,
        torch.random.fork_rng(devices=[]),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        after.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # the cores have workers
        patch.setattr(sys, "argv", [script, *arguments])
        warnings.simplefilter("error")
        for unseen in (DeprecationWarning, PendingDeprecationWarning, ResourceWarning):
            warnings.simplefilter("ignore", unseen)  # as Python does, but for the program's own
        warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def run_by_python(name: str, *arguments: str) -> str:
    # A fall-back to op-by-op execution is a warning, and would be a failure here.
    warm = "0" if "--no-compile" in arguments else "1"  # as by default: Inductor is imported once
    options = ("-W", "error::UserWarning")
    result = run_program(*options, str(EXAMPLES / name), *arguments, TORCHPMAP_WARM=warm)
    assert "Warning" not in result.stderr, result.stderr
    return result.stdout


def run_by_torchrun(name: str, *arguments: str) -> str:
    """Run a program as two processes that torchrun starts; return what they print."""
    environment = {"PYTHONWARNINGS": "error::UserWarning"}
    finished = launch(2, str(EXAMPLES / name), *arguments, environment=environment)
    assert finished.code == 0, finished.output
    assert "Warning" not in finished.output, finished.output
    return finished.output
