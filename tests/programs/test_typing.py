"""Covers: the types of the public functions, as type checkers see them in users' programs."""

import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchpmap._transforms import pmap, shard_map
from torchpmap._transforms.arguments import PmapOptions
from torchpmap._transforms.specs import ShardMapOptions

RIGHT, WRONG = (Path(__file__).with_name(f"_typed_{name}.py") for name in ("right", "wrong"))
EXPECTED = {
    number: line.partition("  # error: ")[2]
    for number, line in enumerate(WRONG.read_text().splitlines(), 1)
    if "  # error: " in line
}
"""The line number of each mistake, and mypy's code for it."""

Reports = dict[Path, dict[int, list[str]]]
"""File -> line -> codes of the errors in it."""


@pytest.fixture(scope="module")
def mypy(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    pytest.importorskip("mypy")
    settings = tmp_path_factory.mktemp("mypy") / "mypy.ini"
    settings.write_text("[mypy]\nstrict = true\n[mypy-torchpmap.*]\nfollow_imports = silent\n")
    cache = getattr(pytestconfig, "cache", None)  # pytest may run without
    known = cache.mkdir("mypy") if cache else settings.parent
    options = [f"--config-file={settings}", f"--cache-dir={known}", "--no-pretty"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(RIGHT), str(WRONG)],
        capture_output=True,
        text=True,
        cwd=RIGHT.parents[2],
    )
    assert not done.stderr, done.stderr
    reports: Reports = {RIGHT: {}, WRONG: {}}
    for line in done.stdout.splitlines()[:-1]:
        if found := re.fullmatch(r"(\S+?):(\d+): error: .*\[([\w-]+)\]", line):
            path, number, code = found.groups()
            reports[(RIGHT.parents[2] / path)].setdefault(int(number), []).append(code)
    return reports


@pytest.mark.long  # make types runs it
def test_mypy_accepts_right_programs(mypy: Reports):
    assert mypy[RIGHT] == {}


@pytest.mark.long  # make types runs it
def test_mypy_reports_mistakes(mypy: Reports):
    missed = {n: code for n, code in EXPECTED.items() if code not in mypy[WRONG].get(n, [])}
    assert missed == {}
    assert mypy[WRONG].keys() == EXPECTED.keys()


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_agrees():
    done = subprocess.run(
        ["pyright", "--outputjson", "--pythonpath", sys.executable, str(RIGHT), str(WRONG)],
        capture_output=True,
        text=True,
        cwd=RIGHT.parents[2],
    )
    errors = [
        (Path(each["file"]), each["range"]["start"]["line"] + 1)
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    assert [number for path, number in errors if path == RIGHT] == []
    assert {number for path, number in errors if path == WRONG} == EXPECTED.keys()


@pytest.mark.parametrize(
    ("function", "options", "more"),
    [
        (pmap.pmap, PmapOptions, {}),
        (shard_map.shard_map, ShardMapOptions, {"out_specs": "Required[Any]"}),
    ],
)
def test_options_are_keyword_arguments(function: Any, options: Any, more: dict[str, str]):
    """The overloads take them from the options, the implementation lists them."""
    parameters = inspect.signature(function).parameters.values()
    keywords = {each.name: each.annotation for each in parameters if each.kind is each.KEYWORD_ONLY}
    declared = {name: ref.__forward_arg__ for name, ref in options.__annotations__.items()}
    assert declared == keywords | more
