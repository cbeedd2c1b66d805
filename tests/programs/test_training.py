"""Covers: examples/train_*.py: three ports of an ordinary training script, against the script."""

import ast
import difflib
import functools
import re
import tempfile

import pytest
from _examples import EXAMPLES, run_here
from _support import DEVICE

pytestmark = [
    pytest.mark.timeout(250),
    pytest.mark.skipif(DEVICE != "cpu", reason="autocast and losses of the CPU"),
]

EXACT = ("--no-amp", "--dropout", "0")
NOT_COMPILED = {"jit": ("--no-compile",), "pmap": ("--no-compile",), "replicated": (), "plain": ()}


def code(name):
    """The lines of an example after its docstring that are not empty."""
    text = (EXAMPLES / f"train_{name}.py").read_text()
    start = ast.parse(text).body[0].end_lineno
    return [line for line in text.splitlines()[start:] if line.strip()]


@pytest.mark.parametrize(("name", "number"), [("jit", 27), ("replicated", 10), ("pmap", 22)])
def test_changed_lines(name, number):
    matcher = difflib.SequenceMatcher(None, code("plain"), code(name), autojunk=False)
    changes = [
        max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"
    ]
    assert sum(changes) == number
    assert f"with {number} changed lines" in (EXAMPLES / f"train_{name}.py").read_text()


def run(name, *arguments):
    """What an example prints."""
    with tempfile.TemporaryDirectory() as folder:
        if "--checkpoint" not in arguments:
            arguments = (*arguments, "--checkpoint", f"{folder}/train.pt")
        return run_here(f"train_{name}.py", *arguments, *NOT_COMPILED[name])


@functools.cache
def plain(*arguments):
    return run("plain", *arguments)


def same(printed, expected, tolerance):
    """Equal lines, and numbers to a relative tolerance; accuracies to one in a hundred."""
    pattern = r"\d+\.\d+(?=%)|\d+\.\d+"
    assert re.sub(pattern, "", printed) == re.sub(pattern, "", expected)
    for line, other in zip(printed.splitlines(), expected.splitlines(), strict=True):
        for is_percent, mine, theirs in zip(
            (m.end() < len(line) and line[m.end()] == "%" for m in re.finditer(pattern, line)),
            re.findall(pattern, line),
            re.findall(pattern, other),
            strict=False,
        ):
            wanted = (
                pytest.approx(float(theirs), abs=1.0)
                if is_percent
                else pytest.approx(float(theirs), rel=tolerance)
            )
            assert float(mine) == wanted, (line, other)


# with dropout, drawn in the controller; sums in another order, which Adam enlarges
PLAIN = [
    (name, more, n, 5e-3)
    for name, more in (("jit", EXACT), ("replicated", EXACT[:1]), ("pmap", EXACT))
    for n in "124"
]
# bfloat16 has 8 bits, so an activation differs by 0.4 % if a sum is rounded otherwise
MIXED = [(name, ("--dropout", "0"), "2", 3e-2) for name in ("jit", "replicated", "pmap")]


@pytest.mark.long
@pytest.mark.parametrize(("name", "options", "devices", "tolerance"), PLAIN + MIXED)
def test_losses_are_those_of_one_device(name, options, devices, tolerance):
    arguments = ("--epochs", "2", *options)
    same(run(name, *arguments, "--devices", devices), plain(*arguments), tolerance)


@pytest.mark.long
@pytest.mark.parametrize("name", ["jit", "replicated", "pmap"])
def test_early_stop_and_resume_on_another_number_of_devices(name, tmp_path):
    whole = plain("--epochs", "2", *EXACT)
    arguments = ("--epochs", "2", *EXACT, "--checkpoint", str(tmp_path / "train.pt"))
    stopped = run(name, *arguments, "--devices", "2", "--patience", "0")
    assert stopped.splitlines()[-1] == "no better loss: stopped early"
    first = "".join(whole.splitlines(keepends=True)[:4])
    same(stopped, first + "no better loss: stopped early\n", 5e-3)
    rest = "".join(whole.splitlines(keepends=True)[4:])
    same(run(name, *arguments, "--devices", "4", "--resume"), rest, 5e-3)


@pytest.mark.long
def test_one_device_resumes_what_many_have_saved(tmp_path):
    arguments = ("--epochs", "2", *EXACT, "--checkpoint", str(tmp_path / "train.pt"))
    run("replicated", *arguments, "--devices", "2", "--patience", "0")
    rest = "".join(plain("--epochs", "2", *EXACT).splitlines(keepends=True)[4:])
    same(run("plain", *arguments, "--resume"), rest, 5e-3)


def test_the_comparison_can_fail():
    for printed in ("loss 1.02", "loss 1.00, 50.00%", "gain 1.00", "loss 1.00\nloss 1.00"):
        with pytest.raises(AssertionError):
            same(printed, "loss 1.00, 52.00%" if "%" in printed else "loss 1.00", 5e-3)
