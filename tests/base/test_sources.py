"""Covers: _base/sources.py: whose code a file is."""

from __future__ import annotations

import pytest

from torchpmap._base.sources import PACKAGE, TORCH, users_frames, users_line

ASKS = "def ask():\n    return users_line()\n"


def line_in(file, **scope):
    """The line that is found by code of a file."""
    exec(compile(ASKS, file, "exec"), scope := {**scope, "users_line": users_line})
    return scope["ask"]()


@pytest.mark.parametrize(
    "file", [PACKAGE + "_trace/trace.py", TORCH + "nn/modules/linear.py", "<eval_with_key>.7"]
)
def test_code_of_others_is_passed_over(file):
    named = {} if file.startswith("<") else {"__name__": "somewhere"}
    assert line_in(file, **named).startswith(__file__)


@pytest.mark.parametrize(
    "file", [PACKAGE[:-1] + "_tools/model.py", TORCH[:-1] + "vision/ops.py", "<string>", "cell.py"]
)
def test_the_users_code_is_found(file):
    assert line_in(file, __name__="__main__") == f"{file}:2"


def test_frames_end_within_a_call():
    def inner():
        return list(users_frames(outer.__code__))

    def outer():
        return inner()

    assert [frame.f_code.co_name for frame in outer()] == ["inner"]
