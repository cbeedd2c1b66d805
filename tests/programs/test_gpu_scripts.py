"""Covers: tests/gpu.py and benchmarks/gpu.py, on a machine without a GPU and in a Python that has
only torch, numpy, cloudpickle, pytest and what these need.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from _support import SCALE, imported

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


sys.path.append(str(BENCHMARKS))
gpu = imported(BENCHMARKS / "gpu.py")  # tests/gpu.py is ``gpu`` too
from _gpu import inside  # noqa: E402  (found through the lines above)

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
        for about in target.parent.glob(f"{name}-*.dist-info"):  # torch 2.15 finds Gloo by it
            (packages / about.name).symlink_to(about)
    return folder / "bin" / "python"


def run(*command: object, code: int = 0) -> str:
    """What a command of the repository prints."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHPMAP_", "PYTEST"))}
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": ".", "CUDA_VISIBLE_DEVICES": ""},
        timeout=250 * SCALE,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


FILES = ("base/test_axis_spec.py", "base/test_default_device.py")
"""One that needs hypothesis, one that starts a pool."""


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_tests_of_the_cpu_are_skipped_on_gpus():
    options = ("-o", "addopts=", "-p", "no:cacheprovider", "-rs")
    command = (sys.executable, "-m", "pytest", *options, "tests/runtime/test_two_hosts.py")
    printed = run("env", "TORCHPMAP_TEST_DEVICE=cuda", "TORCHPMAP_TEST_ALL=1", *command)
    assert re.search(r"CPU devices only: hosts here are namespaces\n=+ \d+ skipped in", printed)


@pytest.mark.long
def test_a_limit_of_time_leaves_the_rest_for_later(tmp_path):
    command = (sys.executable, "tests/gpu.py", "--output", tmp_path, "--minutes", "0.05")
    printed = run(
        *command, "--section", "shared", "--part", "2/3", "--files", "a.py", "b.py", "c.py"
    )
    assert "not run yet: shared b.py\n" in printed
    assert "a.py" not in printed


# -- benchmarks/gpu.py -----------------------------------------------------------------------------


@pytest.mark.long
def test_the_benchmark_runs_sections_in_processes(bare, tmp_path):
    sections = ("training-torchrun", "faults")
    printed = run(bare, "benchmarks/gpu.py", "--output", tmp_path, "--sections", *sections)
    first, *lines, _ = printed.splitlines()
    assert first == (
        "No GPU here: this tests the script on the lagging platform, and measures nothing."
    )
    assert [line.split()[:2] for line in lines] == [["ok", f"{name}:"] for name in sections]
    report = json.loads((tmp_path / "results.json").read_text())
    assert {line["section"] for line in report["results"]} == set(sections)
    assert report["environment"]["gpu"] is None
    table = (tmp_path / "table.md").read_text()
    assert "| step | ms | " in table
    assert "No GPU: these numbers test the script" in table
    assert (tmp_path / "training-torchrun.trace.json.gz").exists()


HERE = [name for name in gpu.SECTIONS if name not in ("training-torchrun", "faults")]
"""These sections need neither a launcher nor an asynchronous device."""


@pytest.mark.long
@pytest.mark.parametrize("name", HERE)
def test_a_section(name, tmp_path):
    gpu.run_section(name, tmp_path / "journal.jsonl", "cpu")
    lines = gpu.read(tmp_path / "journal.jsonl")
    assert [line for line in lines if line.get("passed") is False] == []
    assert len([line for line in lines if not {"passed", "value", "median_s"}.isdisjoint(line)]) > 0


MADE = """
import os, signal, sys, time

sys.path.insert(0, {folder!r})
import gpu


def broken(bench):
    bench.number("before", 1.5, "s")
    with bench.part("a part"):
        raise ArithmeticError("no")
    bench.check("behind", True)


def killed(bench):
    bench.number("before", 2.5, "s")
    os.kill(os.getpid(), signal.SIGKILL)


def endless(bench):
    time.sleep(60)


sys.modules["_gpu.made"] = sys.modules["__main__"]
gpu.SECTIONS.clear()
for name, limit_s in (("broken", 60), ("killed", 60), ("endless", 0.5), ("never", 1)):
    gpu.SECTIONS[name] = gpu.Section("made", name, limit_s)
sys.exit(gpu.main())
"""


@pytest.mark.long
def test_a_section_that_fails_stops_no_other(tmp_path):
    script = tmp_path / "made.py"
    script.write_text(MADE.replace("{folder!r}", repr(str(BENCHMARKS))))
    command = (sys.executable, script, "--output", tmp_path)
    printed = run(*command, "--sections", "broken", "killed", "endless", code=1).splitlines()
    assert [line.split()[:2] for line in printed[1:-1]] == [
        ["FAILED", "broken:"],
        ["FAILED", "killed:"],
        ["FAILED", "endless:"],
    ]
    lines = gpu.read(tmp_path / "journal.jsonl")
    numbers = [(line["section"], line["value"]) for line in lines if "value" in line]
    assert numbers == [("broken", 1.5), ("killed", 2.5)]
    assert [line["ended"] for line in lines if "ended" in line] == [0, -9, None]
    table = (tmp_path / "table.md").read_text()
    for text in ("**a part** is not as it must be", "ArithmeticError: no", "1 of 2 checks passed"):
        assert text in table
    assert "**killed ended with code -9**" in table
    assert "**endless took too long**" in table
    # again, into the same folder: a section replaces what it wrote before; no time, so none begins
    printed = run(*command, "--sections", "killed", "never", "--minutes", "0").splitlines()
    assert printed[1:-1] == ["not run: killed", "not run: never"]
    assert {line["section"] for line in gpu.read(tmp_path / "journal.jsonl")} == {
        "broken",
        "endless",
    }


def test_sections_of_training_are_compared():
    def number(section, name, value):
        return {"section": section, "name": name, "value": value, "unit": ""}

    lines = [
        *(number("training", "step", 60.0), number("training", "loss of the last step", 3.0)),
        number("training-compile", "step", 50.0),
        number("training-compile", "loss of the last step", 3.03),
    ]
    first, second = gpu.compared(lines)
    assert (first["name"], first["value"]) == ("training: step", 1.2)
    assert second["passed"]
    lines[1]["value"] = 2.9
    assert not gpu.compared(lines)[1]["passed"]


def test_idle_share():
    # [0, 3] and [5, 10] of ten
    assert inside.idle_share([(5, 10), (1, 3), (0, 2)]) == pytest.approx(0.2)
    assert inside.idle_share([(0, 4), (1, 2)]) == 0
    assert inside.idle_share([]) == -1
